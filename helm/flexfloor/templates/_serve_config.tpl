{{/* Serve's configuration. One replica, beside the coordinator: see deploy/application.py. */}}
{{- define "flexfloor.serveConfig" -}}
proxy_location: HeadOnly
http_options:
  host: {{ .Values.config.service.host }}
  port: {{ .Values.config.service.port }}
applications:
  - name: flexfloor
    import_path: deploy.application:build
    route_prefix: /
    args:
      {{- toYaml .Values.config | nindent 6 }}
{{- end -}}
