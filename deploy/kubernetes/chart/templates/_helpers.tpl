{{- define "nfsrdmad.labels" -}}
app.kubernetes.io/name: nfsrdmad
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "nfsrdmad.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "nfsrdmad.pluginDir" -}}
{{ .Values.kubeletDir }}/plugins/{{ .Values.driverName }}
{{- end }}
