{{- define "holdfast.labels" -}}
{{ include "holdfast.selector" . }}
app.kubernetes.io/part-of: holdfast
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "holdfast.selector" -}}
app.kubernetes.io/name: holdfast
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "holdfast.name" -}}
{{- if gt (len .Release.Name) 40 }}
{{- fail (printf "release name %q: at most 40 characters, because names of pods and services contain it" .Release.Name) }}
{{- end }}
{{- .Release.Name }}
{{- end }}

{{- define "holdfast.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}

{{- define "holdfast.tokens" -}}
{{ .Values.tokens.existingSecret | default (printf "%s-tokens" (include "holdfast.name" .)) }}
{{- end }}

{{/* none, secret or certManager. Values that contradict it are errors: an upgrade must not turn TLS off without a word. */}}
{{- define "holdfast.tlsMode" -}}
{{- $mode := .Values.tls.mode | default "none" }}
{{- $secrets := .Values.tls.secrets | default dict }}
{{- $issuer := (.Values.tls.certManager | default dict).issuer }}
{{- if and $issuer (ne $mode "certManager") }}
{{- fail (printf "tls.certManager.issuer is set, and tls.mode is %q: set tls.mode to certManager" $mode) }}
{{- end }}
{{- if and (or .Values.tls.existingSecret $secrets.supervisor $secrets.diagnostics) (ne $mode "secret") }}
{{- fail (printf "tls.existingSecret or tls.secrets is set, and tls.mode is %q: set tls.mode to secret" $mode) }}
{{- end }}
{{- if and (eq $mode "certManager") (not $issuer) }}
{{- fail "tls.mode is certManager: set tls.certManager.issuer to the name of an issuer with a CA of its own" }}
{{- end }}
{{- if and (eq $mode "certManager") (or (contains ".." .Values.fleet) (hasSuffix "." .Values.fleet)) }}
{{- fail (printf "fleet %q: cert-manager accepts it in no certificate; name the fleet without two dots in a row and without a dot at its end" .Values.fleet) }}
{{- end }}
{{- $mode }}
{{- end }}

{{/* The Secret with the certificate of a component: supervisor, diagnostics, or agent (empty in the mode secret). */}}
{{- define "holdfast.tlsSecret" -}}
{{- $mode := include "holdfast.tlsMode" .root }}
{{- if eq $mode "certManager" }}{{ include "holdfast.name" .root }}-{{ .component }}-tls
{{- else if and (eq $mode "secret") (ne .component "agent") }}
{{- $secrets := .root.Values.tls.secrets | default dict }}
{{- get $secrets .component | default .root.Values.tls.existingSecret
  | required (printf "tls.mode is secret: set tls.secrets.%s, or tls.existingSecret for both services" .component) }}
{{- end }}
{{- end }}

{{/* With a certificate, supervisors serve the API with TLS, unless supervisor.settings.API_TLS is "off". */}}
{{- define "holdfast.apiScheme" -}}
{{- $settings := .Values.supervisor.settings }}
{{- if and (ne (toString $settings.API_TLS) "off") (or (include "holdfast.tlsSecret" .) $settings.API_TLS_CERT) }}https{{ else }}http{{ end }}
{{- end }}

{{- define "holdfast.ownRedis" -}}
{{- if not (or .Values.redis.externalUrl .Values.redis.externalUrlSecret) }}yes{{ end }}
{{- end }}

{{- define "holdfast.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "holdfast.name" .) }}
{{- else }}{{ .Values.serviceAccount.name | default "default" }}
{{- end }}
{{- end }}

{{/* Whether supervisors ask the API server. */}}
{{- define "holdfast.bridge" -}}
{{- if or .Values.kubernetes.watch .Values.kubernetes.replacePods }}yes{{ end }}
{{- end }}

{{- define "holdfast.bridgeNamespaces" -}}
{{- prepend .Values.kubernetes.namespaces .Release.Namespace | uniq | join "," }}
{{- end }}

{{/* The endpoints of diagnostics, best first, each by its own name: agents must agree on one. */}}
{{- define "holdfast.diagnostics" -}}
{{- $name := printf "%s-diagnostics" (include "holdfast.name" .) }}
{{- $endpoints := list }}
{{- range $index := until (int .Values.diagnostics.replicas) }}
{{- $endpoints = append $endpoints (printf "%s-%d.%s.%s.svc:8472" $name $index $name $.Release.Namespace) }}
{{- end }}
{{- join "," $endpoints }}
{{- end }}

{{/* What supervisors and diagnostics have in common. Only supervisors, and only with the bridge, have access to the API server. */}}
{{- define "holdfast.pod" -}}
{{- if and (eq .component "supervisor") (include "holdfast.bridge" .root) }}
serviceAccountName: {{ include "holdfast.name" .root }}-supervisor
automountServiceAccountToken: true
{{- else }}
serviceAccountName: {{ include "holdfast.serviceAccount" .root }}
automountServiceAccountToken: false
{{- end }}
enableServiceLinks: false
terminationGracePeriodSeconds: 30
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "holdfast.selector" . | nindent 14 }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "holdfast.unprivileged" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "holdfast.environment" -}}
- {name: HOLDFAST_FLEET, value: {{ .root.Values.fleet | quote }}}
- {name: HOLDFAST_LOG_FORMAT, value: json}
- {name: HOLDFAST_JOIN_TOKEN_FILE, value: /etc/holdfast/fleet/join-token}
{{- if .root.Values.redis.externalUrlSecret }}
- name: HOLDFAST_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ .root.Values.redis.externalUrlSecret }}, key: {{ get (.root.Values.redis.externalUrlKeys | default dict) .component | default "redis-url" }}}}
{{- else if .root.Values.redis.externalUrl }}
- {name: HOLDFAST_REDIS_URL, value: {{ .root.Values.redis.externalUrl | quote }}}
{{- else }}
- {name: HOLDFAST_REDIS_URL, value: "redis://{{ .component }}@{{ include "holdfast.name" .root }}-redis.{{ .root.Release.Namespace }}.svc:6379/0?password_file=/etc/holdfast/redis/password"}
{{- end }}
{{- if include "holdfast.tlsSecret" . }}
- {name: HOLDFAST_TLS_CERT, value: /etc/holdfast/tls/tls.crt}
- {name: HOLDFAST_TLS_KEY, value: /etc/holdfast/tls/tls.key}
- {name: HOLDFAST_TLS_CA, value: /etc/holdfast/tls/ca.crt}
{{- end }}
{{- with .root.Values.telemetry.otlpEndpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- range $name, $value := .values.settings }}
- {name: HOLDFAST_{{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{/* The Secret and the key of the password that a service reads from a file; empty = its URL has the password, or there is none. */}}
{{- define "holdfast.redisPassword" -}}
{{- if include "holdfast.ownRedis" .root }}
secretName: {{ include "holdfast.tokens" .root }}
items: [{key: redis-{{ .component }}-password, path: password}]
{{- else if get (.root.Values.redis.externalPasswordKeys | default dict) .component }}
secretName: {{ required "redis.externalPasswordKeys: set redis.externalUrlSecret to the Secret with these keys" .root.Values.redis.externalUrlSecret }}
items: [{key: {{ get .root.Values.redis.externalPasswordKeys .component }}, path: password}]
{{- end }}
{{- end }}

{{- define "holdfast.mounts" -}}
- {name: fleet, mountPath: /etc/holdfast/fleet, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if include "holdfast.redisPassword" . }}
- {name: redis, mountPath: /etc/holdfast/redis, readOnly: true}
{{- end }}
{{- if include "holdfast.tlsSecret" . }}
- {name: tls, mountPath: /etc/holdfast/tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "holdfast.volumes" -}}
- name: fleet
  secret:
    secretName: {{ include "holdfast.tokens" .root }}
    defaultMode: 0440
    items: [{key: join-token, path: join-token}]
- name: tmp
  emptyDir: {sizeLimit: 256Mi}
{{- with include "holdfast.redisPassword" . }}
- name: redis
  secret:
    defaultMode: 0440
    {{- . | nindent 4 }}
{{- end }}
{{- if include "holdfast.tlsSecret" . }}
- name: tls
  secret: {secretName: {{ include "holdfast.tlsSecret" . }}, defaultMode: 0440}
{{- end }}
{{- end }}
