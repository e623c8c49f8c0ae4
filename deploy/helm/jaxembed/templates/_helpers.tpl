{{- define "jaxembed.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "jaxembed.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "jaxembed.labels" -}}
{{ include "jaxembed.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "jaxembed.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}
{{- else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- define "jaxembed.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "jaxembed.name" .) }}
{{- else }}{{ .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "jaxembed.cacheClaim" -}}
{{- if .Values.cache.existingClaim }}{{ .Values.cache.existingClaim }}
{{- else if .Values.cache.create }}{{ include "jaxembed.name" . }}-cache{{ end }}
{{- end }}

{{/* The chips of a topology such as 2x4. */}}
{{- define "jaxembed.chips" -}}
{{- $sides := splitList "x" .Values.tpu.topology }}{{ mul (first $sides) (last $sides) }}
{{- end }}

{{/* What a device asks of `resources`, as a limit: requests follow it. */}}
{{- define "jaxembed.devices" -}}
{{- if .Values.tpu.accelerator }}
limits:
  google.com/tpu: {{ include "jaxembed.chips" . }}
{{- else if .Values.gpu.count }}
limits:
  {{ .Values.gpu.resource }}: {{ .Values.gpu.count }}
{{- end }}
{{- end }}

{{- define "jaxembed.args" -}}
{{- range .Values.models }}
- --model-id
- {{ .id | quote }}
{{- end }}
{{- range .Values.models }}
{{- if .name }}
- --served-model-name
- {{ printf "%s=%s" .name .id | quote }}
{{- end }}
{{- end }}
{{- range .Values.args }}
- {{ . | quote }}
{{- end }}
- --drain-timeout
- {{ .Values.drainTimeout | quote }}
{{- end }}
