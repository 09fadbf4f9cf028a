{{/* A worker group with what it leaves out: the defaults of deploy/chart_values.py. */}}
{{- define "flexfloor.workerGroup" -}}
{{- $defaults := dict "minReplicas" 0 "gpusPerPod" 1 "gpuResource" "nvidia.com/gpu" "idleTimeoutSeconds" 60 "scalingPriority" 0 "terminationGracePeriodSeconds" 60 -}}
{{- mergeOverwrite $defaults . | toYaml -}}
{{- end -}}

{{- define "flexfloor.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 100
fsGroup: 100
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "flexfloor.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- end -}}

{{/* What all pods have in common. Takes root, component, group (Head or WorkerGroup). */}}
{{- define "flexfloor.podSpec" -}}
{{- if .root.Values.serviceAccounts.create }}
serviceAccountName: {{ include "flexfloor.serviceAccount" . }}
{{- end }}
restartPolicy: Never
securityContext:
  {{- include "flexfloor.podSecurity" . | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .group.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .group.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .group.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .group.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- $journal := and (eq .component "head") .root.Values.journal.claimName }}
{{- if or .root.Values.model.claimName $journal }}
volumes:
{{- with .root.Values.model.claimName }}
  - name: model
    persistentVolumeClaim:
      claimName: {{ . }}
      readOnly: true
{{- end }}
{{- with $journal }}
  - name: journal
    persistentVolumeClaim:
      claimName: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "flexfloor.containerCommon" -}}
image: {{ include "flexfloor.image" .root | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- include "flexfloor.containerSecurity" . | nindent 2 }}
lifecycle:
  preStop:
    exec:
      command: [/bin/sh, -c, ray stop]
{{- $journal := and (eq .component "head") .root.Values.journal.claimName }}
{{- if or .root.Values.model.claimName $journal }}
volumeMounts:
{{- if .root.Values.model.claimName }}
  - name: model
    mountPath: {{ .root.Values.model.mountPath }}
    readOnly: true
{{- end }}
{{- if $journal }}
  - name: journal
    mountPath: {{ .root.Values.journal.mountPath }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "flexfloor.env" -}}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
# Actors that lease no GPU may look at those of their node.
- name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO
  value: "0"
{{- with .group.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}
