#!/usr/bin/env bash
# Sets up as train.sh does, runs the linter (over what git tracks), then the tests. Other arguments go to pytest.
# A whole suite runs in three processes; --fast, named files, the long tests and those of a GPU run in one.
#   --fork   what judges numbers: without linter, pages and imports
#   --fast   a minute of one core: no process is launched, a stand-in takes vLLM's place
#   --long   those that take minutes each, which are left out otherwise
# What only tests need (requirements/tests.txt: pytest-xdist, W&B's package) goes into the .venv that setup.sh makes and
# nowhere else. With GRPO_VENV or GRPO_PYTHON nothing is added: without these packages one process runs, and W&B's tests
# are skipped. To have them there: PYTHON -m pip install --no-deps -r requirements/tests.txt
set -euo pipefail

# shellcheck source=setup.sh
source "$(dirname "$0")/../setup.sh"

select="not long"
if [[ ${1:-} == --long ]]; then select="long"; shift; fi
if [[ ${1:-} == --fork ]]; then select+=" and not house"; shift; fi  # --fast is an option of tests/conftest.py
if [[ $GRPO_DEVICE == cpu ]]; then
    select+=" and not gpu"
    export TORCHDYNAMO_DISABLE=1  # vLLM's sampler is compiled: dies without a C++ compiler, slow with one
    export OMP_NUM_THREADS=1      # two OpenMP threads a process collapse as soon as a second process runs
fi
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes import the program: each would compile it
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1  # tests need no network

if [[ -z ${GRPO_PYTHON:-}${GRPO_VENV:-} ]] && ! cmp -s requirements/tests.txt "$venv/tests.txt"; then
    pip_install -r requirements/tests.txt || failed
    cp requirements/tests.txt "$venv/tests.txt"
fi
files=$(git grep -l '' -- '*.py' 2>/dev/null) || files=.  # those that are there; all where the folder is no repository
# shellcheck disable=SC2086
[[ $select == *house* ]] || "$PYTHON" -m ruff check $files
parallel=()
if [[ $GRPO_DEVICE == cpu && $select != long* && $* != *--fast* && $* != *tests/* ]] && "$PYTHON" -c "import xdist" 2>/dev/null; then
    workers=3  # on two cores: tests of whole runs wait for deadlines, signals and each other
    parallel=(-n "$workers" --dist loadfile --no-loadscope-reorder)  # tests/conftest.py has order and what stays together
fi
exec "$PYTHON" -m pytest -c pyproject.toml -q -m "$select" "${parallel[@]}" "$@"
