#!/usr/bin/env bash
# Makes the environments of the peers in benchmarks/decode.py and quantised.py. Quick when there is nothing to do.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: benchmarks/peers.sh [vllm] [llama] [openvino] [onnxruntime] [ctranslate2]

Makes .venv-vllm, .venv-llama, .venv-openvino, .venv-onnxruntime and .venv-ctranslate2 beside .venv: vLLM's CPU build,
llama.cpp's Python package, built here for this processor, OpenVINO GenAI, ONNX Runtime GenAI and CTranslate2. All by
default. They need about 9 GB, a C and a C++ compiler, and ten to twenty minutes.
transformers, another peer, is in .venv.

environment:
  PYTHON   the Python that makes the environments (default: python3)
TEXT
}

vllm() {
    scripts/install --vllm
}

# Its AMX kernels end in an illegal instruction if GCC removes stores to their tile configuration (llama.cpp, pull request
# 26954), of which GCC's own header reads eight bytes only.
llama() {
    environment .venv-llama
    CMAKE_ARGS="-DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS='-fno-dse -fno-tree-dse' ${CMAKE_ARGS:-}" \
        .venv-llama/bin/python -m pip install -q --no-cache-dir numpy gguf llama-cpp-python==0.3.36
}

openvino() {
    environment .venv-openvino
    .venv-openvino/bin/python -m pip install -q openvino-genai==2026.4.1.0
}

onnxruntime() {
    environment .venv-onnxruntime
    converter .venv-onnxruntime onnx==1.23.2 onnx-ir==1.1.0 onnxruntime==1.32.0 onnxruntime-genai==0.18.0
}

ctranslate2() {
    environment .venv-ctranslate2
    converter .venv-ctranslate2 ctranslate2==4.8.5
}

# What reads a transformers checkpoint, with the versions of .venv: converter ENVIRONMENT PACKAGE...
converter() {
    "$1/bin/python" -m pip install -q -c constraints.txt torch transformers "${@:2}"
}

environment() {
    [[ -x $1/bin/python ]] || "${PYTHON:-python3}" -m venv "$1"
}

unset CDPATH
cd "$(dirname "$0")/.."
(($#)) || set -- vllm llama openvino onnxruntime ctranslate2
for each in "$@"; do
    case $each in
        vllm | llama | openvino | onnxruntime | ctranslate2) ;;
        -h | --help) usage; exit 0 ;;
        *) echo "peers.sh: unknown argument $each (see --help)" >&2; exit 1 ;;
    esac
done
for each in "$@"; do
    stamp=.venv-$each/peer
    wanted=$(sha256sum < benchmarks/peers.sh)
    if [[ ! -f $stamp || $(< "$stamp") != "$wanted" ]]; then
        echo "peers.sh: $each ..."
        "$each"
        echo "$wanted" > "$stamp"
    fi
done
echo "peers.sh: ready"
