# Shared by the launch scripts: environment, a scratch directory, processes that start and stop together.
# Source it after `set -euo pipefail` and the definition of `usage`, with the script's own "$@". Needs bash 4.4.

for argument in "$@"; do
    if [[ $argument == -h || $argument == --help ]]; then
        usage
        exit 0
    fi
done

script_arguments=("$@")

# What the variables ask of every worker.
worker_arguments=()
[[ -z ${SERVED_MODEL_NAME:-} ]] || worker_arguments+=(--served-model-name "$SERVED_MODEL_NAME")
[[ -z ${ENGINE:-} ]] || worker_arguments+=(--engine "$ENGINE")

# What is set for Dynamo's processes, or for how a front door reads answers: a worker on another runtime refuses it.
dynamos_variables=(DYN_DISCOVERY_BACKEND DYN_NAMESPACE DYN_NAMESPACE_WORKER_SUFFIX DYN_COMPONENT DYN_ENDPOINT
    DYN_ENDPOINT_TYPES DYN_REQUEST_PLANE DYN_RESPONSE_PLANE DYN_EVENT_PLANE DYN_TOOL_CALL_PARSER DYN_REASONING_PARSER
    DYN_DEFAULT_THINKING_MODE)

# Ends a process with this script, even if it is killed; one that was not under way by then does not begin.
lifeline=()
if command -v setpriv > /dev/null; then
    lifeline=(setpriv --pdeathsig TERM -- bash -c '((PPID == $0)) && exec "$@"' "$$")
fi

launch_name=$(basename "$0" .sh)
unset CDPATH # with which cd may go elsewhere, and says where
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
scratch=
frontend_url= # behind the front door
probe= # prepares the environment or the model, or waits for it
declare -a process_names=() # in the order they were started
declare -A process_pids=()
declare -A system_ports=() # of workers, by name: where their metrics are
declare -A status_of_sigterm=() # those but 0 with which a process may end when it is told to

# Ends nothing where it cannot be written: on a full disk, or where its reader has gone, as `tee` has after Ctrl-C.
say() {
    echo "$launch_name: $*" || true
}

fail() {
    echo "$launch_name: error: $*" >&2
    exit 1
}

# check_number NAME FROM TO: stops unless the variable NAME is a whole number in that range.
check_number() {
    [[ ${!1} =~ ^(0|[1-9][0-9]{0,8})$ ]] && ((${!1} >= $2 && ${!1} <= $3)) ||
        fail "$1 must be a number from $2 to $3, got '${!1}'"
}

# check_port NAME HOST [ELSE]: stops unless the variable NAME is a port that is free on HOST; ELSE is another way on.
check_port() {
    local port=${!1}
    [[ $port =~ ^[1-9][0-9]{0,4}$ ]] && ((port <= 65535)) || fail "$1 must be a port number, got '$port'"
    if (exec 3<> "/dev/tcp/$2/$port") 2> /dev/null; then
        fail "port $port on $2 is taken; set $1 to a free one${3:+, or $3}"
    fi
}

# Sets HTTP_HOST, HTTP_PORT and FRONT_DOOR, and stops if the port is not free.
check_http_port() {
    HTTP_HOST=${HTTP_HOST:-127.0.0.1}
    HTTP_PORT=${HTTP_PORT:-8000}
    FRONT_DOOR=${FRONT_DOOR:-on}
    [[ $FRONT_DOOR == on || $FRONT_DOOR == off ]] || fail "FRONT_DOOR must be on or off, got '$FRONT_DOOR'"
    check_port HTTP_PORT "$HTTP_HOST"
}

# run_aside COMMAND...: in the background, so that Ctrl-C and SIGTERM need not wait for it; its status.
run_aside() {
    local status=0
    "${lifeline[@]}" "$@" &
    probe=$!
    wait "$probe" || status=$?
    probe=
    return "$status"
}

# prepare_environment [EXTRA...]: sets python, the interpreter of an environment that has everything, with these extras
# of the package; makes the environment on first use.
prepare_environment() {
    if [[ ! ${OMP_NUM_THREADS:-1} =~ ^[1-9][0-9]*(,[1-9][0-9]*)*$ ]]; then
        fail "OMP_NUM_THREADS must be a number of threads, got '$OMP_NUM_THREADS'"
    fi
    run_aside "$repository/scripts/install" --runtime-only "${@/#/--with=}" || exit
    python=$(realpath -s "${DLW_VENV:-$repository/.venv}")/bin/python
    choose_worker_python
    # The checkout goes first, and the current directory is no place to import from.
    export PYTHONPATH=$repository${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
}

# Sets worker_python: vLLM's packages do not go together with the frontend's, so its worker has an environment of its own.
choose_worker_python() {
    worker_python=$python
    [[ $(given_option --engine ENGINE "${WORKER_ENGINE:-embedded}") == vllm ]] || return 0
    worker_python=$(realpath -s "${DLW_VLLM_VENV:-$repository/.venv-vllm}")/bin/python
    [[ -x $worker_python ]] || fail "--engine vllm: no Python at $worker_python; run scripts/install --vllm"
}

# Everything on loopback, no services, and all state in a scratch directory.
prepare_runtime() {
    scratch=$(mktemp -d "${TMPDIR:-/tmp}/dynamo-logits-worker.XXXXXX")
    mkdir "$scratch/discovery" "$scratch/home" "$scratch/tmp"
    export TMPDIR=$scratch/tmp # the frontend and torch leave files there
    export DYN_DISCOVERY_BACKEND=file DYN_FILE_KV=$scratch/discovery
    export DYN_REQUEST_PLANE=tcp DYN_TCP_RPC_HOST=127.0.0.1
    export DYN_TCP_RESPONSE_STREAM_HOST=lo # the name of an interface, not an address
    export DYN_SYSTEM_HOST=127.0.0.1
    # The frontend fetches the tokenizer from the worker's system port.
    local direct=${no_proxy:-${NO_PROXY:-}}
    [[ $direct == '*' ]] || direct=${direct:+$direct,}127.0.0.1,localhost,::1
    export no_proxy=$direct NO_PROXY=$direct
    # Load reports for a router that there is none of: with ZeroMQ they would be published on every address.
    export DYN_EVENT_PLANE=zmq WORKER_ENABLE_KV_ROUTING=false
    # A body costs the frontend up to 250 times its size in memory, and its own limit is 45 MB.
    export DYN_HTTP_BODY_LIMIT_MB=${DYN_HTTP_BODY_LIMIT_MB:-2}
    check_number DYN_HTTP_BODY_LIMIT_MB 1 100000
    # Nothing to wait for before a drain: there is no other worker that requests could be sent to.
    export DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS=${DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS:-0}
    export DYN_LOG=${DYN_LOG:-warn,mm_routing=error,dynamo_llm::local_model=error,dynamo_runtime::component=off,dynamo_llm::discovery=error}
}

# Sets MODEL_PATH unless it names a model: to SmolLM2, or to a tiny model with random weights if it is "tiny". Both are
# made on first use. Random weights answer nobody who has not asked for them. An id on the Hugging Face Hub stays as it
# is: its files are downloaded here, once, before the processes that read them start.
prepare_model() {
    if [[ ${MODEL_PATH:-} =~ ^[A-Za-z0-9_][^/]*/[^/]+$ && ! -e $MODEL_PATH ]]; then
        # with the flag, the worker downloads it
        [[ " ${script_arguments[*]} " == *" --revision"[\ =]* ]] ||
            make_model "$MODEL_PATH" ${WORKER_REVISION:+--revision "$WORKER_REVISION"} || fail "no model"
        return
    fi
    [[ -z ${MODEL_PATH:-} || $MODEL_PATH == tiny ]] || return 0
    local cache=${XDG_CACHE_HOME:-${HOME:-$scratch}/.cache}/dynamo-logits-worker
    mkdir -p "$cache" 2> /dev/null && [[ -w $cache ]] || cache=$scratch
    if [[ -z ${MODEL_PATH:-} ]]; then
        prepare_default_model "$cache/models" ||
            fail "no model; set MODEL_PATH to a checkpoint or a GGUF file, or to tiny for a tiny model with random weights"
        return
    fi
    MODEL_PATH=$cache/tiny-model
    say "a tiny model with random weights answers, in $MODEL_PATH"
    run_aside "$python" -m worker.tiny_model "$MODEL_PATH" > /dev/null || fail "no model"
}

# make_model ARGUMENT...: a model with worker.models, which writes its directory into $scratch/model; fails, with a line
# that says why, if it cannot be had.
make_model() {
    run_aside "$python" -m worker.models --caller "$launch_name" "$@" > "$scratch/model"
}

# The value of the worker's option NAME, as the script's arguments or its VARIABLE give it; else DEFAULT.
given_option() {
    local value=${!2:-$3} argument previous=
    for argument in "${script_arguments[@]}"; do
        [[ $previous != "$1" ]] || value=$argument
        [[ $argument != "$1="* ]] || value=${argument#*=}
        previous=$argument
    done
    echo "$value"
}

# Sets MODEL_PATH to the default model in DIRECTORY; fails as make_model does. Its blocks stay quantised where the worker
# reads them so; with --quantization the checkpoint is one that other programs read, too, such as a trainer.
prepare_default_model() {
    local form=()
    if [[ $(given_option --engine ENGINE "${WORKER_ENGINE:-embedded}") == embedded && $(given_option --quantization WORKER_QUANTIZATION auto) == auto ]]; then
        form=(--quantised)
    fi
    make_model "${form[@]}" --cache "$1" || return 1
    MODEL_PATH=$(< "$scratch/model")
    # What is not quantised, and the KV cache.
    export WORKER_DTYPE=${WORKER_DTYPE:-float32}
    say "MODEL_PATH is not set: $(basename "$MODEL_PATH") answers, in $MODEL_PATH"
}

# start NAME COMMAND...: in a session of its own, so that Ctrl-C reaches this script alone, which then stops
# everything in order. The kernel ends it too, should this script be killed.
start() {
    local name=$1
    shift
    setsid "${lifeline[@]}" "$@" < /dev/null &
    process_pids[$name]=$! process_names+=("$name") # one command: no signal comes between them
}

# Lets go of NAME, which is dead, and of what is left of its session; sets lost_status.
forget() {
    local name pid=${process_pids[$1]} others=()
    lost_status=0
    wait "$pid" || lost_status=$?
    kill -KILL -- "-$pid" 2> /dev/null || true
    for name in "${process_names[@]}"; do
        [[ $name == "$1" ]] || others+=("$name")
    done
    process_names=("${others[@]}")
}

# Where the files and batches of HTTP_PORT are kept, off where there is no such place. A port has one front door at a
# time, as the directory needs it.
batch_directory() {
    local state=${XDG_STATE_HOME:-${HOME:+$HOME/.local/state}} place
    place=$state/dynamo-logits-worker/batches-$HTTP_PORT
    [[ -n $state ]] && mkdir -p -m 700 "$place" 2> /dev/null && [[ -w $place ]] && echo "$place" || echo off
}

# The frontend, and the front door before it unless FRONT_DOOR is off.
start_frontend() {
    local host=$HTTP_HOST port=$HTTP_PORT limit=$DYN_HTTP_BODY_LIMIT_MB
    if [[ $FRONT_DOOR == on ]]; then
        host=127.0.0.1 port=$(free_port) limit=$((limit + 1)) # what the front door adds to a body needs room
        frontend_url=http://$host:$port
    fi
    # The frontend leaves copies of every model's tokenizer in ~/.cache; the scratch directory goes away.
    start frontend env HOME="$scratch/home" DYN_HTTP_BODY_LIMIT_MB="$limit" "$python" -m dynamo.frontend \
        --http-host "$host" --http-port "$port" "$@"
    [[ $FRONT_DOOR == off ]] || start "front door" "$python" -m worker.frontdoor --host "$HTTP_HOST" --port "$HTTP_PORT" \
        --upstream "$frontend_url" --body-limit-mib "$DYN_HTTP_BODY_LIMIT_MB" -- --model-path "$MODEL_PATH" \
        "${script_arguments[@]}"
}

# publish_metrics NAME...: the workers of these names get system ports on loopback, and the front door's /metrics has
# their series too. Before start_frontend.
publish_metrics() {
    local name urls=()
    [[ $FRONT_DOOR == on && -z ${FRONT_DOOR_WORKER_METRICS:-} ]] || return 0
    for name in "$@"; do
        system_ports[$name]=$(free_port)
        urls+=("http://127.0.0.1:${system_ports[$name]}")
    done
    FRONT_DOOR_WORKER_METRICS=$(IFS=, && echo "${urls[*]}")
    export FRONT_DOOR_WORKER_METRICS
}

# A port that nobody listens on, and that the kernel does not give to a connection before the frontend takes it.
free_port() {
    "$python" -c '
import contextlib, random, socket
for port in random.sample(range(10_000, 20_000), 1000):
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        print(port)
        break
'
}

start_worker() {
    local port=${system_ports[worker]:-}
    start worker ${port:+env "DYN_SYSTEM_PORT=$port"} "$worker_python" -m worker --model-path "$MODEL_PATH" "$@"
}

alive() {
    kill -0 "${process_pids[$1]}" 2> /dev/null
}

# The name of a process that is gone, if one is.
first_dead() {
    local name
    for name in "${process_names[@]}"; do
        alive "$name" || { echo "$name"; return; }
    done
}

# Ends this script because NAME died.
report_death() {
    local status=0
    wait "${process_pids[$1]}" || status=$?
    fail "the $1 ended with status $status; stopping"
}

# Waits until a request is answered; sets base_url and served_model.
await_model() {
    local host=$HTTP_HOST started=$SECONDS dead status=0
    [[ $host != 0.0.0.0 ]] || host=127.0.0.1
    [[ $host != *:* ]] || host="[$host]"
    base_url=http://$host:$HTTP_PORT
    say "loading the model ..."
    "${lifeline[@]}" "$python" "$repository/launch/await_model.py" "${frontend_url:-$base_url}" "$base_url" \
        > "$scratch/model" &
    probe=$!
    while kill -0 "$probe" 2> /dev/null; do
        dead=$(first_dead)
        [[ -z $dead ]] || report_death "$dead"
        sleep 0.1
        if ((SECONDS - started >= 10)); then
            say "still loading the model ..."
            started=$SECONDS
        fi
    done
    wait "$probe" || status=$?
    probe=
    ((status == 0)) || fail "the model does not answer"
    served_model=$(< "$scratch/model")
}

announce() {
    local key=
    [[ $FRONT_DOOR == off || -z ${FRONT_DOOR_API_KEY_FILE:-} ]] ||
        key=" -H \"Authorization: Bearer \$(grep -m 1 '^[^#]' $(printf %q "$FRONT_DOOR_API_KEY_FILE"))\""
    cat <<TEXT || true

$launch_name: ready. $served_model answers at $base_url/v1; Ctrl-C stops it. Try:

curl $base_url/v1/chat/completions -H 'Content-Type: application/json'$key \\
  -d '{"model": "$served_model", "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32}'

TEXT
    [[ $FRONT_DOOR == off || ${FRONT_DOOR_PLAYGROUND:-} != true ]] || say "in a browser: $base_url/playground"
}

# Ends the script, with 1, when a process dies that nobody starts again.
watch() {
    local dead
    ready=yes
    while :; do
        dead=$(first_dead)
        [[ -z $dead ]] || on_death "$dead"
        while_watching
        sleep 0.5
    done
}

# What `watch` does about NAME, which died, and in every round; several.sh has its own.
on_death() {
    report_death "$1"
}

while_watching() {
    :
}

ready=
forced=

on_signal() {
    trap 'forced=yes' INT TERM HUP
    local status=$1
    [[ -z $ready ]] || status=0
    say "stopping; Ctrl-C again to kill"
    exit "$status"
}

# Stops NAME: asks, waits while it finishes its requests, and kills what is left of its session. Counts its pauses, since
# SECONDS follows the machine's clock, which may be set meanwhile.
stop() {
    local pid=${process_pids[$1]} pauses=$((10 * 10))
    [[ -z $ready ]] || pauses=$((10 * stop_timeout_s))
    kill -TERM "$pid" 2> /dev/null || true
    while alive "$1" && [[ -z $forced ]] && ((pauses-- > 0)); do
        sleep 0.1
    done
    ! alive "$1" || say "killing the $1"
    kill -KILL -- "-$pid" 2> /dev/null || true
    wait "$pid" 2> /dev/null
}

# The last started stops first: the worker drains while the frontend still carries its answers.
clean_up() {
    local status=$? index name stopped pid
    trap 'forced=yes' INT TERM HUP
    for pid in $(jobs -pr); do # of what began as the signal came, and is not noted yet
        if [[ " ${process_pids[*]} $probe " != *" $pid "* ]]; then
            process_pids["newest process"]=$pid process_names+=("newest process")
        fi
    done
    if [[ -n $probe ]]; then # it ignores Ctrl-C, as background commands of scripts do
        kill "$probe" 2> /dev/null || true
        wait "$probe" 2> /dev/null || true
    fi
    for ((index = ${#process_names[@]} - 1; index >= 0; index--)); do
        name=${process_names[index]} stopped=0
        stop "$name" || stopped=$?
        if ((status == 0 && stopped != 0)) && [[ " ${status_of_sigterm[$name]:-} " != *" $stopped "* ]]; then
            say "the $name ended with status $stopped"
            status=1
        fi
    done
    [[ -z $scratch ]] || rm -rf "$scratch"
    trap - EXIT
    exit "$status"
}

# Sets stop_timeout_s, the seconds after which a process that is told to end is killed: more than worker and front door
# give their requests, who else would lose them, and than a worker waits before and after that.
choose_stop_timeout() {
    local seconds name
    stop_timeout_s=135
    for seconds in "$(given_option --drain-timeout-s WORKER_DRAIN_TIMEOUT_S 30)" "${FRONT_DOOR_DRAIN_TIMEOUT_S:-120}"; do
        [[ $seconds =~ ^[0-9]{1,9}(\.[0-9]+)?$ ]] || continue # that is refused, by whom it is for
        seconds=$((10#${seconds%.*} + 15))
        ((seconds <= stop_timeout_s)) || stop_timeout_s=$seconds
    done
    for name in DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS DYN_PREFILL_DRAIN_TIMEOUT_S; do
        [[ ! ${!name:-} =~ ^[0-9]{1,9}(\.[0-9]+)?$ ]] || stop_timeout_s=$((stop_timeout_s + 10#${!name%.*} + 1))
    done
}

model_flag=' (--model(-path)?)[ =]' # other workers' name, too
[[ ! " ${script_arguments[*]} " =~ $model_flag ]] || fail "the model is given as MODEL_PATH, not as ${BASH_REMATCH[1]}"
choose_stop_timeout
trap 'on_signal 130' INT
trap 'on_signal 143' TERM
trap 'on_signal 129' HUP
trap : PIPE # what it says must not end it; processes that it starts do not inherit this
trap clean_up EXIT
