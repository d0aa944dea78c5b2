# Commands as somebody else would run them, on another machine. Sourced by scripts/fresh-install and scripts/release.

# become_stranger HOME: sets stranger, which goes before a command: this home directory, and no settings but those by which
# this machine reaches the network; above all none of pip's, which may find packages here that nobody else has.
become_stranger() {
    local name
    stranger=(env -i PATH=/usr/local/bin:/usr/bin:/bin HOME="$1" LANG=C.UTF-8 PIP_CONFIG_FILE=/dev/null)
    for name in {http,https,no}_proxy {HTTP,HTTPS,NO}_PROXY SSL_CERT_FILE PIP_CERT; do
        [[ -z ${!name:-} ]] || stranger+=("$name=${!name}")
    done
}
