# Shared by the launch scripts that start several workers. They define `usage`, and source this with their own "$@".

for argument in "$@"; do
    if [[ $argument == -h || $argument == --help ]]; then
        usage
        exit 0
    fi
done

source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

PREFILL_WORKERS=${PREFILL_WORKERS:-1} DECODE_WORKERS=${DECODE_WORKERS:-1} WORKERS=${WORKERS:-2}
worker_arguments=()

# Everything before the first process.
prepare_several() {
    local name
    for name in PREFILL_WORKERS DECODE_WORKERS WORKERS; do
        [[ ${!name} =~ ^[1-9][0-9]?$ ]] || fail "$name must be a number from 1 to 99, got '${!name}'"
    done
    [[ -z ${SERVED_MODEL_NAME:-} ]] || worker_arguments+=(--served-model-name "$SERVED_MODEL_NAME")
    [[ -z ${ENGINE:-} ]] || worker_arguments+=(--engine "$ENGINE")
    # One port cannot be every worker's.
    unset DYN_SYSTEM_PORT
    check_http_port
    prepare_environment
    prepare_runtime
    prepare_model
}

# start_workers NAME COUNT ARGUMENT...: workers NAME 1 to NAME COUNT.
start_workers() {
    local name=$1 count=$2 number
    shift 2
    for ((number = 1; number <= count; number++)); do
        start "$name $number" "$python" -m worker --model-path "$MODEL_PATH" "$@"
    done
}
