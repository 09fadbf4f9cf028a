{{/* KubeRay appends to the name of a RayService: at most 47 characters, and a letter first. */}}
{{- define "flexfloor.name" -}}
{{- $name := .Values.nameOverride | default (contains "flexfloor" .Release.Name | ternary .Release.Name (printf "%s-flexfloor" .Release.Name)) -}}
{{- if gt (len $name) 47 -}}
{{- fail (printf "the name %q has %d characters, KubeRay takes 47: choose a shorter release name or set nameOverride" $name (len $name)) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the name %q must be lower-case letters, digits and dashes, and begin with a letter: choose another release name or set nameOverride" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* Pods have these. Not app.kubernetes.io/name: KubeRay sets and selects by its own. */}}
{{- define "flexfloor.podLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: flexfloor
{{- end -}}

{{- define "flexfloor.labels" -}}
{{ include "flexfloor.podLabels" . }}
app.kubernetes.io/name: flexfloor
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "flexfloor.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "flexfloor.tokenSecret" -}}
{{ .Values.auth.existingSecret | default (printf "%s-token" (include "flexfloor.name" .)) }}
{{- end -}}

{{/* Of a component: head or worker. */}}
{{- define "flexfloor.serviceAccount" -}}
{{ include "flexfloor.name" .root }}-{{ .component }}
{{- end -}}
