# Commands as somebody else would run them, on another machine. Sourced by scripts/fresh-install and scripts/release.

# as_stranger HOME COMMAND...: with this home directory, and no settings but those by which this machine reaches the
# network; above all none of pip's, which may find packages here that nobody else has.
as_stranger() {
    local home=$1 kept=() name
    shift
    for name in {http,https,no}_proxy {HTTP,HTTPS,NO}_PROXY SSL_CERT_FILE PIP_CERT; do
        [[ -z ${!name:-} ]] || kept+=("$name=${!name}")
    done
    env -i PATH=/usr/local/bin:/usr/bin:/bin HOME="$home" LANG=C.UTF-8 PIP_CONFIG_FILE=/dev/null "${kept[@]}" "$@"
}
