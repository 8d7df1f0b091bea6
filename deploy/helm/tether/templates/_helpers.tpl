{{- define "tether.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "tether.fullname" -}}
{{- .Values.fullnameOverride | default (ternary .Release.Name (printf "%s-tether" .Release.Name) (contains "tether" .Release.Name)) | trunc 48 | trimSuffix "-" }}
{{- end }}

{{/* Of a component: (dict "root" $ "component" "router") */}}
{{- define "tether.selector" -}}
app.kubernetes.io/name: {{ include "tether.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "tether.labels" -}}
{{ include "tether.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: tether
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "tether.meta" -}}
name: {{ include "tether.fullname" .root }}-{{ .name | default .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "tether.labels" . | nindent 2 }}
{{- end }}

{{- define "tether.image" -}}
{{- $image := printf "%s-%s" .root.Values.image.repository .component }}
{{- $registry := .root.Values.global.imageRegistry }}
{{- if $registry }}{{ $image = printf "%s/%s" $registry $image }}{{ end }}
{{- $digest := dig "digest" "" (get .root.Values .component | default dict) }}
{{- if $digest }}{{ printf "%s@%s" $image $digest }}{{ else }}{{ printf "%s:%s" $image (.root.Values.image.tag | default .root.Chart.AppVersion) }}{{ end }}
{{- end }}

{{- define "tether.sandboxes" -}}
{{- .Values.sandboxes.namespace | default .Release.Namespace }}
{{- end }}

{{- define "tether.nats" -}}
{{- printf "%s-nats" .Release.Name | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "tether.nats.url" -}}
{{- if .Values.nats.enabled }}nats://{{ include "tether.nats" . }}.{{ .Release.Namespace }}.svc:4222{{ else }}{{ .Values.externalNats.url }}{{ end }}
{{- end }}

{{- define "tether.nats.port" -}}
{{- if .Values.nats.enabled }}4222{{ else }}{{ int .Values.externalNats.port }}{{ end }}
{{- end }}

{{- define "tether.tokens" -}}
{{- .Values.http.existingSecret | default (printf "%s-http-tokens" (include "tether.fullname" .)) }}
{{- end }}

{{- define "tether.postgres" -}}
{{- if or .Values.database.url .Values.database.existingSecret }}true{{ end }}
{{- end }}

{{- define "tether.replicas" -}}
{{- if .Values.streamReplicas }}{{ int .Values.streamReplicas }}{{ else if .Values.nats.enabled }}{{ int .Values.nats.replicas }}{{ else }}1{{ end }}
{{- end }}

{{- define "tether.container.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop:
    - ALL
{{- end }}

{{- define "tether.pod.security" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "tether.pull" -}}
{{- with .Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Sources of the projected volume with what a service is told in confidence. */}}
{{- define "tether.given.bus" -}}
{{- if .Values.nats.enabled }}
- secret:
    name: {{ .Values.nats.existingSecret | default (printf "%s-auth" (include "tether.nats" .)) }}
    items:
      - key: password
        path: bus-password
{{- else if .Values.externalNats.existingSecret }}
{{- if or .Values.externalNats.user .Values.externalNats.credsKey .Values.externalNats.caKey }}
- secret:
    name: {{ .Values.externalNats.existingSecret }}
    items:
      {{- if .Values.externalNats.user }}
      - key: {{ .Values.externalNats.passwordKey }}
        path: bus-password
      {{- else if .Values.externalNats.credsKey }}
      - key: {{ .Values.externalNats.credsKey }}
        path: bus.creds
      {{- end }}
      {{- with .Values.externalNats.caKey }}
      - key: {{ . }}
        path: bus-ca.pem
      {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tether.env" -}}
- name: TETHER_NATS_URL
  value: {{ include "tether.nats.url" . | quote }}
{{- if .Values.nats.enabled }}
- name: TETHER_NATS_USER
  value: {{ .Values.nats.user | quote }}
- name: TETHER_NATS_PASSWORD_FILE
  value: /run/tether/secrets/bus-password
{{- else if .Values.externalNats.user }}
- name: TETHER_NATS_USER
  value: {{ .Values.externalNats.user | quote }}
- name: TETHER_NATS_PASSWORD_FILE
  value: /run/tether/secrets/bus-password
{{- else if .Values.externalNats.credsKey }}
- name: TETHER_NATS_CREDS_FILE
  value: /run/tether/secrets/bus.creds
{{- end }}
{{- if and (not .Values.nats.enabled) .Values.externalNats.caKey }}
- name: TETHER_NATS_TLS_CA_FILE
  value: /run/tether/secrets/bus-ca.pem
{{- end }}
- name: TETHER_TENANTS
  value: {{ join "," .Values.tenants | quote }}
- name: TETHER_REPLICAS
  value: {{ include "tether.replicas" . | quote }}
- name: TETHER_LOG_LEVEL
  value: {{ .Values.log.level | quote }}
- name: TETHER_LOG_FORMAT
  value: {{ .Values.log.format | quote }}
- name: TETHER_METRICS_LISTEN
  value: 0.0.0.0:9465
- name: TETHER_READY_FILE
  value: /tmp/tether-ready
{{- with .Values.traces.endpoint }}
- name: TETHER_TRACES_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* A copy that the service's own user alone reads: a mounted Secret is readable by the pod's group, which services refuse. */}}
{{- define "tether.init" -}}
- name: secrets
  image: {{ include "tether.image" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command:
    - python3
    - -I
    - -c
    - |
      import os, pathlib
      os.umask(0o077)
      for file in pathlib.Path("/run/tether/given").iterdir():
          if file.is_file():
              target = pathlib.Path("/run/tether/secrets", file.name)
              target.unlink(missing_ok=True)
              target.write_bytes(file.read_bytes())
  securityContext:
    {{- include "tether.container.security" . | nindent 4 }}
  volumeMounts:
    - name: given
      mountPath: /run/tether/given
      readOnly: true
    - name: secrets
      mountPath: /run/tether/secrets
{{- end }}

{{/* The pod of a service: root, component, given (sources), env, ports, probes, volumes, mounts, grace, account, lifecycle. */}}
{{- define "tether.pod" -}}
{{- $values := get .root.Values .component }}
metadata:
  labels:
    {{- include "tether.labels" . | nindent 4 }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ printf "%s%s" (.config | default "") (toYaml .root.Values.http) | sha256sum }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- if .account }}
  serviceAccountName: {{ include "tether.fullname" .root }}-{{ .component }}
  {{- end }}
  automountServiceAccountToken: {{ not (empty .account) }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .grace }}
  {{- include "tether.pull" .root | nindent 2 }}
  securityContext:
    {{- include "tether.pod.security" . | nindent 4 }}
  initContainers:
    {{- include "tether.init" . | nindent 4 }}
  containers:
    - name: {{ .component }}
      image: {{ include "tether.image" . }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      # A container that is started again keeps /tmp: it is not ready because its forerunner was.
      command:
        - /bin/sh
        - -c
        - rm -f /tmp/tether-ready; exec python3 -P -m service
      env:
        {{- include "tether.env" .root | nindent 8 }}
        {{- with .env }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - name: metrics
          containerPort: 9465
          protocol: TCP
        {{- with .ports }}
        {{- . | nindent 8 }}
        {{- end }}
      {{- .probes | nindent 6 }}
      {{- with .lifecycle }}
      lifecycle:
        {{- . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- include "tether.container.security" . | nindent 8 }}
      {{- with $values.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - name: secrets
          mountPath: /run/tether/secrets
          readOnly: true
        - name: tmp
          mountPath: /tmp
        {{- with .mounts }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: given
      projected:
        defaultMode: 0440
        {{- $given := printf "%s%s" (include "tether.given.bus" .root) (.given | default "") | trim }}
        {{- if $given }}
        sources:
          {{- $given | nindent 10 }}
        {{- else }}
        sources: []
        {{- end }}
    - name: secrets
      emptyDir:
        medium: Memory
        sizeLimit: 4Mi
    - name: tmp
      emptyDir:
        sizeLimit: 256Mi
    {{- with .volumes }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- if $values.topologySpread }}
  topologySpreadConstraints:
    {{- $selector := include "tether.selector" . }}
    {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- $selector | nindent 10 }}
    {{- end }}
  {{- end }}
{{- end }}

{{/* Ready: the service said so. Alive: its process answers; never a dependency. */}}
{{- define "tether.probes" -}}
readinessProbe:
  exec:
    command:
      - test
      - -f
      - /tmp/tether-ready
  periodSeconds: 5
  timeoutSeconds: 5
livenessProbe:
  tcpSocket:
    port: metrics
  periodSeconds: 20
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{- define "tether.pdb" -}}
{{- $values := get .root.Values .component }}
{{- $scaled := or $values.hpa.enabled (dig "keda" "enabled" false $values) }}
{{- if and $values.pdb (or $scaled (gt (int $values.replicas) 1)) }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "tether.meta" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "tether.selector" . | nindent 6 }}
{{- end }}
{{- if $values.hpa.enabled }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "tether.meta" . | nindent 2 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {{ include "tether.fullname" .root }}-{{ .component }}
  minReplicas: {{ int $values.hpa.minReplicas }}
  maxReplicas: {{ int $values.hpa.maxReplicas }}
  metrics:
    - type: Resource
      resource:
        name: cpu
        target:
          type: Utilization
          averageUtilization: {{ int $values.hpa.cpuPercent }}
{{- end }}
{{- end }}
