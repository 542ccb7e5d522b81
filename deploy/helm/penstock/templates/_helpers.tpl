{{- define "penstock.labels" -}}
app.kubernetes.io/name: penstock
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
{{- define "penstock.attach" -}}
{{- if and .Values.grantNodes (not .Values.node.inline) -}}true{{- else -}}false{{- end -}}
{{- end }}
