{{- define "tierkv.name" -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- end }}

{{- define "tierkv.labels" -}}
app.kubernetes.io/name: tierkv
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "tierkv.selector" -}}
app.kubernetes.io/name: tierkv
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* The meta servers, as every role must know them: cluster.meta_address. */}}
{{- define "tierkv.metas" -}}
{{- $name := include "tierkv.name" . -}}
{{- $all := list -}}
{{- range $i := until (int .Values.meta.replicas) -}}
{{- $all = append $all (printf "%s-meta-%d.%s-meta.%s.svc:7400" $name $i $name $.Release.Namespace) -}}
{{- end -}}
{{- join "," $all -}}
{{- end }}

{{- /* What all roles get: the settings, the meta servers, the machine that shares memory. */}}
{{- define "tierkv.environment" -}}
- name: TIERKV_CONFIG
  value: /etc/tierkv/tierkv.toml
- name: TIERKV_CLUSTER_META_ADDRESS
  value: {{ include "tierkv.metas" . | quote }}
- name: TIERKV_CLUSTER_RUN_DIR
  value: /var/lib/tierkv
- name: TIERKV_CLUSTER_HOST
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- if .Values.tls.secretName }}
- {name: TIERKV_CLUSTER_TLS_CERT, value: /etc/tierkv-tls/tls.crt}
- {name: TIERKV_CLUSTER_TLS_KEY, value: /etc/tierkv-tls/tls.key}
- {name: TIERKV_CLUSTER_TLS_CA, value: /etc/tierkv-tls/ca.crt}
- {name: TIERKV_CLUSTER_TLS_NAME, value: {{ .Values.tls.name | quote }}}
{{- end }}
{{- end }}

{{- define "tierkv.podAddress" -}}
- name: TIERKV_CLUSTER_ADVERTISE
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- if .Values.zones }}
- name: TIERKV_CLUSTER_ZONE
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['topology.kubernetes.io/zone']"}}
{{- end }}
{{- end }}

{{- define "tierkv.image" -}}
image: {{ printf "%s:%s" .Values.image.repository .Values.image.tag | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "tierkv.pod" -}}
automountServiceAccountToken: false
securityContext: {runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- end }}

{{- define "tierkv.config" -}}
- name: config
  secret: {secretName: {{ include "tierkv.name" . }}-config, defaultMode: 0440}
{{- if .Values.tls.secretName }}
- name: tls
  secret: {secretName: {{ .Values.tls.secretName }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "tierkv.mounts" -}}
- {name: config, mountPath: /etc/tierkv, readOnly: true}
{{- if .Values.tls.secretName }}
- {name: tls, mountPath: /etc/tierkv-tls, readOnly: true}
{{- end }}
{{- end }}

{{- /* A change of the settings starts the pods again, one after the other. */}}
{{- define "tierkv.checksum" -}}
checksum/config: {{ .Files.Get "files/tierkv.toml" | sha256sum }}
{{- end }}
