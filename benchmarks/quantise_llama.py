"""llama.cpp writes a GGUF file in another format: ``python quantise_llama.py FROM TO FORMAT``."""

from __future__ import annotations

import sys

import llama_cpp

FORMATS = {"Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0}


def main() -> None:
    source, target, form = sys.argv[1:]
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FORMATS[form]
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), params):
        raise SystemExit(f"llama.cpp could not write {form}")


if __name__ == "__main__":
    main()
