#!/usr/bin/env bash
# Set-up for train.sh and tests/run.sh, which source it and get PYTHON (with every package of the lock), GRPO_DEVICE
# (cpu or cuda) and the repository root as working directory. A second run costs milliseconds; after an interruption, or
# with another lock, it starts over. What a user can set:
#   GRPO_DEVICE=cpu|cuda       which lock; default: cuda where `nvidia-smi -L` works
#   GRPO_VENV=dir              where the environment goes; default .venv
#   GRPO_PYTHON=path/python    install nothing, use this Python (say, of a GPU image that has torch and vLLM)
# It first checks for what packages cannot bring: for CUDA the driver, a C compiler, Python's headers; for a CPU libnuma.
set -euo pipefail

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

find_python() {  # runs each candidate: a version manager's shim on PATH may not work
    local name
    for name in python3 python3.12 python3.13 python3.11 python3.14; do
        "$name" -c 'import sys, venv, ensurepip
assert (3, 11) <= sys.version_info[:2] <= (3, 14)
print(sys.executable)' 2>/dev/null && return
    done
    die "needs Python 3.11 to 3.14 with the venv module; none of python3, python3.11 ... python3.14 qualifies." \
        "Install one, e.g. 'apt-get install python3.12 python3.12-venv', or set GRPO_PYTHON (see setup.sh)"
}

check_driver() {  # for the lock's torch, which needs CUDA 13; another torch (GRPO_PYTHON) says what it needs
    local driver
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || true
    [[ $driver =~ ^[0-9]+ ]] && ((BASH_REMATCH[0] >= 580)) || die "the packages of $lock need NVIDIA's driver 580 or" \
        "newer, but nvidia-smi shows '${driver:-none}': run 'apt-get install nvidia-driver-580', or set GRPO_DEVICE=cpu"
}

check_compiler() {  # PYTHON: at run time Triton compiles the code that launches its kernels
    local version include
    if [[ -v CC ]]; then command -v "$CC"; else command -v gcc || command -v clang; fi >/dev/null ||
        die "Triton needs a C compiler, but '${CC-gcc or clang}' was not found: run 'apt-get install gcc', or name one in CC"
    read -r version include < <("$1" -ISc 'import sys, sysconfig
print("%d.%d" % sys.version_info[:2], sysconfig.get_path("include", "posix_prefix"))')
    [[ -f $include/Python.h ]] || die "Triton needs Python's C headers, but $include/Python.h was not found:" \
        "run 'apt-get install python$version-dev', or set GRPO_PYTHON to a Python that has them"
}

check_numa() {
    "$1" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
        die "on a CPU vLLM needs libnuma.so.1, which was not found: run 'apt-get install libnuma1'"
}

stamp() {  # what an environment was made from; with the path, because scripts of a moved environment are wrong
    echo "$GRPO_DEVICE $(sha256sum <"$lock" | cut -c1-64) $(readlink -f "$venv/bin/python") $venv"
}

ready() { [[ -x $venv/bin/python && $(stamp) == "$(cat "$venv.stamp" 2>/dev/null)" ]]; }

pip_install() {  # full output to the log, a line now and then to the terminal; builds nothing
    "$venv/bin/python" -m pip install --no-deps --only-binary=:all: --progress-bar=off "$@" 2>&1 |
        tee -a "$venv/install.log" | awk '
            /^(Collecting|Processing)/ && ++n % 20 == 0 { print "setup: " n " packages fetched"; fflush() }
            /^Installing collected packages/ { print "setup: unpacking " n; fflush() }' >&2
}

install() {
    local was need=5 free torch  # need: GB, downloads included; CPU measured, CUDA estimated
    read -r was _ <"$venv.stamp" || was=
    if [[ -d $venv && -n $(ls -A "$venv") ]]; then  # never remove what is not ours, or the other device's
        [[ -n $was ]] || die "$venv already exists, and setup.sh did not make it. Move it away, choose another place" \
            "with GRPO_VENV=dir, or use it as it is with GRPO_PYTHON=$venv/bin/python"
        [[ $was == "$GRPO_DEVICE" ]] || die "$venv holds the $was packages, this run needs $GRPO_DEVICE." \
            "Remove it, or choose another place for these: GRPO_VENV=.venv-$GRPO_DEVICE"
    fi
    echo "$GRPO_DEVICE unfinished" >"$venv.stamp"
    rm -rf "$venv"
    [[ $GRPO_DEVICE == cpu ]] || need=16
    free=$(($(df -Pk "$(dirname "$venv")" | awk 'NR == 2 {print $4}') / 1000000))
    ((free >= need)) || die "$venv needs $need GB of disk space, but only $free GB are free. Free some, or set GRPO_VENV=dir"
    say "installing the packages of $lock with $python into $venv (once, some minutes)"
    "$python" -m venv "$venv" || die "$python could not make a virtual environment in $venv"
    torch=$(grep '^torch==' "$lock")
    # The CPU build is not on PyPI: where pip's own places lack it, it comes from PyTorch's index, and nothing else does.
    pip_install "$torch" || { [[ $GRPO_DEVICE == cpu ]] && say "pip's own index has no $torch, trying PyTorch's" &&
        pip_install --index-url https://download.pytorch.org/whl/cpu "$torch"; } || failed
    pip_install -r "$lock" || failed
    stamp >"$venv.stamp"
    say "done: $(du -sh "$venv" | cut -f1) in $SECONDS s"
}

failed() {
    grep -i '^error' "$venv/install.log" | tail -2 | cut -c1-300 >&2
    die "pip failed. Is there a network, and can pip reach a package index? See $venv/install.log, then run this again."
}

[[ $(uname -s) == Linux ]] || die "needs Linux, as vLLM's wheels do; elsewhere, use a Linux container"
cd "$(dirname "${BASH_SOURCE[0]}")"
GRPO_DEVICE=${GRPO_DEVICE:-$(nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)}
lock=requirements/$GRPO_DEVICE.txt
export GRPO_DEVICE  # the run holds torch to it (base/system/ranks.py)
[[ -f $lock ]] || die "GRPO_DEVICE must be cpu or cuda, not '$GRPO_DEVICE'"
if [[ -n ${GRPO_PYTHON:-} ]]; then
    PYTHON=$(command -v "$GRPO_PYTHON") || die "GRPO_PYTHON=$GRPO_PYTHON is not a program"
else
    venv=$(realpath -m "${GRPO_VENV:-.venv}")
    if ! ready; then
        python=$(find_python)
        if [[ $GRPO_DEVICE == cuda ]]; then check_driver; check_compiler "$python"; else check_numa "$python"; fi
        mkdir -p "$(dirname "$venv")"
        (   # one at a time; a set-up that waited finds it done
            flock -n 9 || { say "waiting for another set-up of $venv"; flock 9; }
            ready || install
        ) 9>>"$venv.stamp"
    fi
    PYTHON=${venv#"$PWD/"}/bin/python
fi
[[ $GRPO_DEVICE == cpu ]] || check_compiler "$PYTHON"
