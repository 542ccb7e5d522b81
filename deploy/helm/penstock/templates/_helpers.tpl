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
