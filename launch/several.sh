# Shared by the launch scripts that start several workers. Source it as lib.sh.

source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

PREFILL_WORKERS=${PREFILL_WORKERS:-1} DECODE_WORKERS=${DECODE_WORKERS:-1} WORKERS=${WORKERS:-2}

# Everything before the first process.
prepare_several() {
    local name
    prepare_pool_secret
    for name in PREFILL_WORKERS DECODE_WORKERS WORKERS; do
        [[ ${!name} =~ ^[1-9][0-9]?$ ]] || fail "$name must be a number from 1 to 99, got '${!name}'"
    done
    # One port cannot be every worker's.
    unset DYN_SYSTEM_PORT
    check_http_port
    prepare_environment
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

# start_workers NAME COUNT ARGUMENT...: workers NAME 1 to NAME COUNT.
start_workers() {
    local name=$1 count=$2 number
    shift 2
    for ((number = 1; number <= count; number++)); do
        DLW_POOL_SECRET=$pool_secret start "$name $number" "$python" -m worker --model-path "$MODEL_PATH" "$@"
    done
}
