{{/* What the schema cannot see: settings that are fine alone and wrong together. */}}
{{- define "flexfloor.check" -}}
{{- $slots := 0 -}}
{{- range $name, $given := .Values.workerGroups -}}
{{- $group := include "flexfloor.workerGroup" $given | fromYaml -}}
{{- if gt (int $group.minReplicas) (int $group.maxReplicas) -}}
{{- fail (printf "workerGroups.%s.minReplicas is %d, above maxReplicas = %d: lower it or raise maxReplicas" $name (int $group.minReplicas) (int $group.maxReplicas)) -}}
{{- end -}}
{{- $slots = add $slots (mul (int $group.maxReplicas) (int $group.gpusPerPod)) -}}
{{- end -}}
{{- $wanted := mulf (.Values.config.group.max_workers | default 4) (.Values.config.lease.resources.GPU | default 0) -}}
{{- if gt (float64 $wanted) (float64 $slots) -}}
{{- fail (printf "config.group.max_workers = %d needs %v GPUs, the worker groups have at most %d: lower it or raise workerGroups.*.maxReplicas" (int .Values.config.group.max_workers) $wanted (int $slots)) -}}
{{- end -}}
{{- range $resource, $amount := .Values.config.coordinator.resources -}}
{{- if ne $resource "flexfloor_control" -}}
{{- fail (printf "config.coordinator.resources.%s: the chart gives the head flexfloor_control, and nothing else keeps the coordinator off nodes that come and go" $resource) -}}
{{- end -}}
{{- end -}}
{{- if .Values.journal.claimName -}}
{{- $directory := .Values.config.coordinator.journal_dir | default "" -}}
{{- if not (hasPrefix .Values.journal.mountPath $directory) -}}
{{- fail (printf "config.coordinator.journal_dir is %q, which is not on journal.claimName = %q: name a directory in journal.mountPath = %s" $directory .Values.journal.claimName .Values.journal.mountPath) -}}
{{- end -}}
{{- end -}}
{{- with .Values.gcsFaultTolerance -}}
{{- if and .enabled (not .redisAddress) -}}
{{- fail "gcsFaultTolerance.redisAddress is empty: name the Redis (redis://host:6379) or set gcsFaultTolerance.enabled=false" -}}
{{- end -}}
{{- end -}}
{{- end -}}
