{{- define "penstock.labels" -}}
app.kubernetes.io/name: penstock-cluster
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}
{{- define "penstock.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end }}
{{- define "penstock.locked" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
{{- define "penstock.pod" -}}
# One user for all of a pod's containers. The group is given to a new volume and never
# again: it would open keys to the group, and servers refuse such keys.
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
serviceAccountName: penstock-server
automountServiceAccountToken: false
priorityClassName: {{ .Values.priorityClassName }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- define "penstock.apart" -}}
podAntiAffinity:
  {{- if eq .how "required" }}
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels: {app.kubernetes.io/name: penstock-cluster, app.kubernetes.io/component: {{ .component }}}
  {{- else }}
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {app.kubernetes.io/name: penstock-cluster, app.kubernetes.io/component: {{ .component }}}
  {{- end }}
{{- end }}
{{- define "penstock.etcdPeers" -}}
{{- range $i := until (int .Values.etcd.replicas) }}{{ if $i }},{{ end }}penstock-etcd-{{ $i }}=https://penstock-etcd-{{ $i }}.penstock-etcd.{{ $.Release.Namespace }}.svc:2380{{ end }}
{{- end }}
{{- define "penstock.etcdEndpoints" -}}
{{- if .Values.etcd.enabled }}{{ range $i := until (int .Values.etcd.replicas) }}{{ if $i }},{{ end }}https://penstock-etcd-{{ $i }}.penstock-etcd.{{ $.Release.Namespace }}.svc:2379{{ end }}{{ else }}{{ join "," .Values.etcd.endpoints }}{{ end }}
{{- end }}
{{- define "penstock.names" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end }}
{{- define "penstock.probes" -}}
# A start may replay a journal or look through disks. There is no probe of liveness: a
# server that can't serve says so, and a restart would not help it.
startupProbe:
  exec: {command: [/penstock, health, "--process=unix:{{ . }}"]}
  periodSeconds: 3
  timeoutSeconds: 6
  failureThreshold: 600
readinessProbe:
  exec: {command: [/penstock, health, "--process=unix:{{ . }}"]}
  periodSeconds: 15
  timeoutSeconds: 6
{{- end }}
