{{- define "dlw.name" -}}
{{ .Values.name | default .Release.Name }}
{{- end }}

{{- define "dlw.image" -}}
{{- $suffix := eq . "embedded" | ternary "" (printf "-%s" .) -}}
dynamo-logits-worker{{ $suffix }}
{{- end }}

{{/* image: root, engine */}}
{{- define "dlw.imageOf" -}}
{{- with .root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ include "dlw.image" .engine }}:{{ .root.Values.image.tag }}
{{- end }}

{{/* Labels that the operator gives the pods of one kind: root, type */}}
{{- define "dlw.labels" -}}
nvidia.com/dynamo-graph-deployment-name: {{ include "dlw.name" .root | quote }}
nvidia.com/dynamo-component-type: {{ .type }}
{{- end }}

{{/* Annotations and labels that values give the pods of one kind: root, type */}}
{{- define "dlw.podMetadata" -}}
{{- $given := eq .type "frontend" | ternary .root.Values.frontend .root.Values.workers -}}
{{- $name := eq .type "frontend" | ternary "frontend" "workers" -}}
{{- range $label, $_ := include "dlw.labels" . | fromYaml -}}
{{- if hasKey ($given.podLabels | default dict) $label -}}
{{- fail (printf "%s.podLabels: %s is the operator's own" $name $label) -}}
{{- end -}}
{{- end -}}
{{- with $given.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $given.podLabels }}
labels:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Topology spread constraints of the pods of one kind, over its own pods where they name none: root, type */}}
{{- define "dlw.spread" -}}
{{- $given := eq .type "frontend" | ternary .root.Values.frontend .root.Values.workers -}}
{{- $selector := dict "labelSelector" (dict "matchLabels" (include "dlw.labels" . | fromYaml)) -}}
{{- $own := list (dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway") -}}
{{- $found := list -}}
{{- range $given.topologySpreadConstraints | default $own -}}
{{- $found = append $found (hasKey . "labelSelector" | ternary (dict) $selector | merge (deepCopy .)) -}}
{{- end -}}
{{- toYaml $found -}}
{{- end }}

{{/* What all pods have: root, type, grace */}}
{{- define "dlw.pod" -}}
{{- $given := eq .type "frontend" | ternary .root.Values.frontend .root.Values.workers -}}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .grace }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- range list "serviceAccountName" "priorityClassName" "nodeSelector" "tolerations" "affinity" }}
{{- if get $given . }}
{{ pick $given . | toYaml }}
{{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
topologySpreadConstraints:
  {{- include "dlw.spread" . | nindent 2 }}
{{- end }}

{{/* Probes and the security context of a container: port, failures */}}
{{- define "dlw.container" -}}
startupProbe:
  httpGet: {path: /live, port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ .failures }}
livenessProbe:
  httpGet: {path: /live, port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /health, port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{/* Volumes that values give, once none has a name, a claim or a place of the chart's own: given, known (names of the
     chart's), claim (the chart's), of, mounts (lists of mounts by the value's name) */}}
{{- define "dlw.volumes" -}}
{{- $names := .known -}}
{{- range .given -}}
{{- if has .name $.known -}}
{{- fail (printf "%s.volumes: the name %s is the chart's own" $.of .name) -}}
{{- else if eq ((.persistentVolumeClaim).claimName | default "") $.claim -}}
{{- fail (printf "%s.volumes: the claim %s is that of the chart's volume models; a pod that has it twice does not start" $.of $.claim) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- range $value, $mounts := .mounts -}}
{{- range $mounts -}}
{{- if has (trimSuffix "/" .mountPath) (list "/models" "/tmp" "/packed" "/cache" "/api-keys") -}}
{{- fail (printf "%s.volumeMounts: the place %s is the chart's own" $value .mountPath) -}}
{{- else if not (has .name $names) -}}
{{- fail (printf "%s.volumeMounts: %s is no volume of %s.volumes" $value .name $.of) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .given -}}
{{- toYaml . -}}
{{- end -}}
{{- end }}

{{/* Options that values give, by flag; with vLLM, flags may have underscores: args, the beginning of their variables' names
     (prefix), env */}}
{{- define "dlw.given" -}}
{{- $found := dict -}}
{{- range .env -}}
{{- if and (hasPrefix $.prefix .name) (or .value .valueFrom) -}}
{{- $_ := set $found (printf "--%s" (trimPrefix $.prefix .name | lower | replace "_" "-")) (.value | default "") -}}
{{- end -}}
{{- end -}}
{{- $flag := "" -}}
{{- $own := true -}}
{{- range .args -}}
{{- $own = and $own (ne . "--") -}}
{{- if and $own (hasPrefix "--" .) -}}
{{- $parts := splitn "=" 2 . -}}
{{- $flag = $parts._0 | replace "_" "-" -}}
{{- $_ := set $found $flag ($parts._1 | default "") -}}
{{- else if and $own $flag -}}
{{- $_ := set $found $flag . -}}
{{- $flag = "" -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end }}

{{/* Options that values give a worker, by flag. Those that the pod or the graph follows are values of their own. */}}
{{- define "dlw.givenToWorkers" -}}
{{- with .Values.workers -}}
{{- $found := include "dlw.given" (dict "prefix" "WORKER_" "args" .args "env" .env) | fromJson -}}
{{- $values := dict "--engine" "engine" "--model-path" "model.path" "--disaggregation-mode" "disaggregated" -}}
{{- range $flag, $value := set $values "--drain-timeout-s" "workers.drainTimeoutSeconds" -}}
{{- if hasKey $found $flag -}}
{{- fail (printf "workers: %s is given by the value %s alone" $flag $value) -}}
{{- end -}}
{{- end -}}
{{- range .env -}}
{{- if has .name (list "DYN_SYSTEM_PORT" "DYN_PREFILL_DRAIN_TIMEOUT_S") -}}
{{- fail (printf "workers.env: %s is the chart's own" .name) -}}
{{- else if eq .name "UCX_NET_DEVICES" -}}
{{- $_ := set $found "--kv-transfer-devices" "" -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}
{{- end }}

{{/* Options that values give a front door, by flag */}}
{{- define "dlw.givenToDoors" -}}
{{- with .Values.frontDoor -}}
{{- $found := include "dlw.given" (dict "prefix" "FRONT_DOOR_" "args" .args "env" .env) | fromJson -}}
{{- range list "--port" "--upstream" "--model-path" -}}
{{- if hasKey $found . -}}
{{- fail (printf "frontDoor: %s is the chart's own" .) -}}
{{- end -}}
{{- end -}}
{{- if and (.apiKeys).secret (hasKey $found "--api-key-file") -}}
{{- fail "frontDoor: --api-key-file is given by the value frontDoor.apiKeys.secret alone" -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}
{{- end }}

{{/* Variables of a container: the chart's own, a YAML text, but for those that values name, and these: own, given */}}
{{- define "dlw.env" -}}
{{- $names := list -}}
{{- range .given -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- $kept := list -}}
{{- range fromYamlArray .own -}}
{{- if not (has .name $names) -}}
{{- $kept = append $kept . -}}
{{- end -}}
{{- end -}}
{{- concat $kept (.given | default list) | toYaml -}}
{{- end }}

{{/* Arguments of a worker: root, type */}}
{{- define "dlw.workerArgs" -}}
{{- $values := .root.Values -}}
{{- $embedded := eq $values.engine "embedded" -}}
{{- $given := include "dlw.givenToWorkers" .root | fromJson -}}
- --engine
- {{ $values.engine }}
- --model-path
- {{ $values.model.path | quote }}
{{- if and $embedded (not (hasKey $given "--packed-copy")) }}
- --packed-copy
- /packed
{{- end }}
{{- if $values.disaggregated }}
- --disaggregation-mode
- {{ .type }}
{{- end }}
{{- if $embedded }}
{{- if not (hasKey $given "--device") }}
- --device
- cpu
{{- end }}
{{- if and $values.workers.kvBlocks (not (or (hasKey $given "--kv-blocks") (hasKey $given "--kv-cache-memory"))) }}
- --kv-blocks
- {{ int $values.workers.kvBlocks | quote }}
{{- end }}
{{- end }}
{{- if and $values.disaggregated (ne $values.engine "trtllm") (not (hasKey $given "--kv-transfer-devices")) }}
- --kv-transfer-devices
- {{ $values.workers.kvTransferDevices | quote }}
{{- end }}
{{- if not (hasKey $given "--enable-kv-routing") }}
- --enable-kv-routing
- {{ $values.router | quote }}
{{- end }}
{{- if ne (int $values.workers.drainTimeoutSeconds) 30 }}
- --drain-timeout-s
- {{ int $values.workers.drainTimeoutSeconds | quote }}
{{- end }}
{{- with $values.workers.args }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The chart's own variables of a worker: root, type */}}
{{- define "dlw.workerEnv" -}}
{{- $values := .root.Values -}}
- name: DYN_SYSTEM_PORT
  value: "9090"
{{- if $values.disaggregated }}
# Prefill signs KV transfers with it, and decode accepts no others.
- name: DLW_POOL_SECRET
  valueFrom:
    secretKeyRef: {{ toJson $values.poolSecret }}
{{- end }}
{{- if eq .type "prefill" }}
# Blocks that decode has not fetched yet are kept this long when the pod stops.
- name: DYN_PREFILL_DRAIN_TIMEOUT_S
  value: "30"
{{- end }}
{{- if eq $values.engine "embedded" }}
# Without it torch starts a thread for every core of the node.
- name: OMP_NUM_THREADS
  valueFrom:
    resourceFieldRef: {containerName: main, resource: {{ include "dlw.countedCores" .root }}}
{{- end }}
# The checkpoint that a GGUF file is converted into, once.
- name: XDG_CACHE_HOME
  value: /cache
{{- end }}

{{/* The amount of cores that a worker counts as its own: a limit that is not given would be the node's cores. */}}
{{- define "dlw.countedCores" -}}
{{- $resources := include "dlw.workerResources" . | fromYaml -}}
{{- if and ($resources.requests).cpu (not ($resources.limits).cpu) -}}requests.cpu{{- else -}}limits.cpu{{- end -}}
{{- end }}

{{- define "dlw.workerResources" -}}
{{- if .Values.workers.resources }}
{{- toYaml .Values.workers.resources }}
{{- else if eq .Values.engine "embedded" -}}
requests: {cpu: "4", memory: 8Gi}
limits: {cpu: "4", memory: 16Gi}
{{- else -}}
requests: {cpu: "4", memory: 32Gi, nvidia.com/gpu: "1"}
limits: {memory: 64Gi, nvidia.com/gpu: "1"}
{{- end }}
{{- end }}

{{/* Number of workers of a kind: root, type. With an autoscaler it is the number that runs: the operator refuses an upgrade
     that changes what its scaling adapter owns. */}}
{{- define "dlw.replicas" -}}
{{- $values := .root.Values -}}
{{- $found := $values.autoscaling.enabled | ternary $values.autoscaling.minReplicas $values.workers.replicas -}}
{{- if $values.autoscaling.enabled -}}
{{- $live := lookup "nvidia.com/v1beta1" "DynamoGraphDeployment" .root.Release.Namespace (include "dlw.name" .root) -}}
{{- range ($live.spec).components -}}
{{- if eq .name $.type -}}
{{- $found = hasKey . "replicas" | ternary .replicas 1 -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- int $found -}}
{{- end }}

{{/* One kind of worker, an item of the graph's components: root, type */}}
{{- define "dlw.worker" -}}
{{- $values := .root.Values -}}
{{- $embedded := eq $values.engine "embedded" -}}
{{- $packs := and $embedded (ne (get (include "dlw.givenToWorkers" .root | fromJson) "--packed-copy") "off") -}}
{{- $cache := $values.workers.cacheSize | default ($packs | ternary "" "16Gi") -}}
{{- $startup := int $values.workers.startupSeconds | default ($embedded | ternary 600 1800) -}}
{{- $known := list "models" "tmp" "cache" -}}
{{- /* seconds until the runtime starts the drain */}}
{{- $wait := 5 -}}
{{- range $values.workers.env -}}
{{- if eq .name "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS" -}}
{{- $wait = float64 .value | ceil | int | max 5 -}}
{{- end -}}
{{- end -}}
{{- $volumes := include "dlw.volumes" (dict "of" "workers" "known" $known "claim" $values.model.claim "given" $values.workers.volumes "mounts" (dict "workers" $values.workers.volumeMounts)) -}}
name: {{ .type }}
type: {{ .type }}
replicas: {{ include "dlw.replicas" . }}
{{- if $values.autoscaling.enabled }}
scalingAdapter: {}
{{- end }}
{{- with $values.image.dynamoVersion }}
runtimeVersionOverride: {{ . | quote }}
{{- end }}
podTemplate:
  {{- with include "dlw.podMetadata" . }}
  metadata:
    {{- . | nindent 4 }}
  {{- end }}
  spec:
    {{- include "dlw.pod" (dict "root" .root "type" .type "grace" (add (int $values.workers.drainTimeoutSeconds) $wait (eq .type "prefill" | ternary 70 40))) | nindent 4 }}
    containers:
      - name: main
        image: {{ include "dlw.imageOf" (dict "root" .root "engine" $values.engine) | quote }}
        imagePullPolicy: {{ $values.image.pullPolicy }}
        command: [python3, -m, worker]
        args:
          {{- include "dlw.workerArgs" . | nindent 10 }}
        env:
          {{- include "dlw.env" (dict "own" (include "dlw.workerEnv" .) "given" $values.workers.env) | nindent 10 }}
        {{- include "dlw.container" (dict "port" 9090 "failures" (div (add $startup 9) 10)) | nindent 8 }}
        resources:
          {{- include "dlw.workerResources" .root | nindent 10 }}
        volumeMounts:
          - {name: models, mountPath: /models, readOnly: true}
          - {name: tmp, mountPath: /tmp}
          {{- if $packs }}
          # What a start leaves for the next one. The same volume: a pod that has a claim in two does not start.
          - {name: models, mountPath: /packed, subPath: .packed}
          {{- end }}
          {{- if $cache }}
          - {name: cache, mountPath: /cache}
          {{- else }}
          - {name: models, mountPath: /cache, subPath: .cache}
          {{- end }}
          {{- with $values.workers.volumeMounts }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
    volumes:
      - name: models
        persistentVolumeClaim: {claimName: {{ $values.model.claim | quote }}{{ if not $packs }}, readOnly: true{{ end }}}
      - name: tmp
        emptyDir: {sizeLimit: {{ $embedded | ternary "2Gi" "16Gi" }}}
      {{- with $cache }}
      - name: cache
        emptyDir: {sizeLimit: {{ . | quote }}}
      {{- end }}
      {{- with $volumes }}
      {{- . | nindent 6 }}
      {{- end }}
{{- end }}
