# Shared by the launch scripts that start several workers. Source it as lib.sh.

source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

PREFILL_WORKERS=${PREFILL_WORKERS:-1} DECODE_WORKERS=${DECODE_WORKERS:-1} WORKERS=${WORKERS:-2}
MAX_RESTARTS=${MAX_RESTARTS:-5}
declare -A worker_commands=() # of each role
declare -A worker_deaths=() # by name: how often it ended with another status than 0
declare -A worker_due=() # by name: rounds of `watch` until it is started again

# Seconds before a worker that was killed is started again, twice that the second time. Not before discovery has
# forgotten the dead one, after 10 s: a frontend of 1.4.2 that hears of a new worker tries the dead one again.
restart_after_s=12

# prepare_several [EXTRA...]: everything before the first process.
prepare_several() {
    local name
    prepare_pool_secret
    for name in PREFILL_WORKERS DECODE_WORKERS WORKERS; do
        check_number "$name" 1 99
    done
    check_number MAX_RESTARTS 0 99
    # One port cannot be every worker's.
    unset DYN_SYSTEM_PORT
    check_http_port
    prepare_environment "$@"
    prepare_runtime
    prepare_migration
    prepare_model
}

# A worker's requests go on in another one when it dies or leaves, unless WORKER_MIGRATION is off. Sets
# frontend_arguments.
prepare_migration() {
    export WORKER_MIGRATION=${WORKER_MIGRATION:-on}
    frontend_arguments=()
    [[ $WORKER_MIGRATION == on ]] || return 0
    frontend_arguments+=(--migration-limit 3)
    export WORKER_BOUNDARY_STORE=${WORKER_BOUNDARY_STORE:-file:$scratch/boundaries}
    # A worker that says nothing for as long counts as dead: longer than the longest prompt takes. Requests that wait
    # for their turn there say that it lives.
    export WORKER_KEEPALIVE_S=${WORKER_KEEPALIVE_S:-10}
    export DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS=${DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS:-60}
}

# await_workers COUNT: until that many workers can be found.
await_workers() {
    local dead
    say "waiting for $1 of the workers ..."
    while (($(find "$scratch/discovery/v1/instances" -type f 2> /dev/null | wc -l) < $1)); do
        dead=$(first_dead)
        [[ -z $dead ]] || report_death "$dead"
        sleep 0.1
    done
}

# share_machine COUNT: that many workers share the cores and the memory of this machine.
share_machine() {
    export WORKER_LOCAL_WORKERS=${WORKER_LOCAL_WORKERS:-$1}
}

# Sets pool_secret, with which workers sign KV transfers; one of this run's own, unless one is given. It is in
# the environment of the workers alone, and on nobody's command line.
prepare_pool_secret() {
    pool_secret=${DLW_POOL_SECRET:-}
    unset DLW_POOL_SECRET
    if [[ -z $pool_secret && -z ${DLW_POOL_SECRET_FILE:-} ]]; then
        pool_secret=$(od -An -v -N32 -tx1 /dev/urandom | tr -d ' \n')
    fi
}

# names ROLE COUNT: ROLE 1 to ROLE COUNT, one per line.
names() {
    seq -f "$1 %.0f" "$2"
}

# start_workers ROLE COUNT ARGUMENT...: workers ROLE 1 to ROLE COUNT.
start_workers() {
    local role=$1 count=$2 number
    shift 2
    worker_commands[$role]=$(printf '%q ' "$worker_python" -m worker --model-path "$MODEL_PATH" "$@")
    for ((number = 1; number <= count; number++)); do
        begin_worker "$role $number"
    done
}

# begin_worker NAME: starts it, for the first time or again.
begin_worker() {
    local port=${system_ports[$1]:-}
    status_of_sigterm[$1]="143 1" # while it still loads: its modules, its model
    eval "DLW_POOL_SECRET=\$pool_secret start \"\$1\" ${port:+env DYN_SYSTEM_PORT=$port} ${worker_commands[${1% *}]}"
}

# A worker that died is started again, unless it has been too often already; the others go on. A worker that left in
# order (SIGTERM to it alone, for a rolling restart) is replaced at once.
on_death() {
    local name=$1 role=${1% *} delay_s=0
    [[ -n ${worker_commands[$role]:-} ]] || report_death "$name"
    forget "$name"
    if ((lost_status != 0)); then
        worker_deaths[$name]=$((${worker_deaths[$name]:-0} + 1))
        if ((${worker_deaths[$name]} > MAX_RESTARTS)); then
            say "the $name ended with status $lost_status; it is not started again"
            is_served "$role" || fail "that was the last $role; stopping"
            return
        fi
        delay_s=$((restart_after_s * ${worker_deaths[$name]}))
    fi
    say "the $name ended with status $lost_status; it is started again in $delay_s s"
    worker_due[$name]=$((2 * delay_s)) # each takes half a second; the machine's clock may be set meanwhile
}

# Whether a worker of ROLE runs, or is about to be started.
is_served() {
    local name
    for name in "${process_names[@]}" "${!worker_due[@]}"; do
        [[ ${name% *} != "$1" ]] || return 0
    done
    return 1
}

# Starts the workers whose time has come.
while_watching() {
    local name
    for name in "${!worker_due[@]}"; do
        if ((${worker_due[$name]} > 0)); then
            worker_due[$name]=$((${worker_due[$name]} - 1))
        else
            unset "worker_due[$name]"
            begin_worker "$name"
        fi
    done
}
