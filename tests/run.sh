#!/usr/bin/env bash
# Sets up as train.sh does, then runs the linter and the tests. Arguments go to pytest; --long runs the long tests instead.
set -euo pipefail

# shellcheck source=setup.sh
source "$(dirname "$0")/../setup.sh"

select="not long"
if [[ ${1:-} == --long ]]; then select="long"; shift; fi
if [[ $GRPO_DEVICE == cpu ]]; then
    select+=" and not gpu"
    export TORCHDYNAMO_DISABLE=1  # vLLM's sampler is under torch.compile: without a C++ compiler it dies, with one it is slow
    export OMP_NUM_THREADS=1      # two OpenMP threads a process collapse as soon as a second process runs
fi
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1  # tests need no network

"$PYTHON" -m ruff check .
exec "$PYTHON" -m pytest -q -m "$select" "$@"
