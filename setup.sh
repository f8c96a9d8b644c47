#!/usr/bin/env bash
# Set-up shared by train.sh and tests/run.sh, which source it and get PYTHON (with every package of the lock),
# GRPO_DEVICE (cpu or cuda) and the repository root as working directory. Done once, it costs milliseconds;
# interrupted, or with another lock, it starts over. What a user can set:
#   GRPO_DEVICE=cpu|cuda       which lock; default: cuda where `nvidia-smi -L` works
#   GRPO_VENV=dir              where the environment goes; default .venv
#   GRPO_PYTHON=path/python    install nothing, use this (say, of a GPU image that has torch and vLLM)
set -euo pipefail

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

find_python() {  # runs each candidate: a version manager's shim can be on PATH and not work
    local name
    for name in python3 python3.12 python3.13 python3.11 python3.14; do
        "$name" -c 'import sys, venv, ensurepip
assert (3, 11) <= sys.version_info[:2] <= (3, 14)
print(sys.executable)' 2>/dev/null && return
    done
    die "needs Python 3.11 to 3.14 with its venv module; none of python3, python3.11 ... python3.14 is one." \
        "Install one, e.g. 'apt-get install python3.12 python3.12-venv', or set GRPO_PYTHON (see setup.sh)"
}

stamp() {  # what an environment was made from; with its path, as a moved environment has wrong scripts
    echo "$GRPO_DEVICE $(sha256sum <"$lock" | cut -c1-64) $(readlink -f "$venv/bin/python") $venv"
}

ready() { [[ -x $venv/bin/python && $(stamp) == "$(cat "$venv.stamp" 2>/dev/null)" ]]; }

pip_install() {  # full output to the log, a line now and then to the screen; nothing is built from source
    "$venv/bin/python" -m pip install --no-deps --only-binary=:all: --progress-bar=off "$@" 2>&1 | {
        local line fetched=0
        while IFS= read -r line; do
            echo "$line" >>"$venv/install.log"
            case $line in
                Collecting*|Processing*) ((++fetched % 40)) || say "$fetched packages fetched" ;;
                "Installing collected packages"*) say "unpacking $fetched" ;;
            esac
        done
    }
}

install() {
    local was need=5 free torch python  # need: GB, downloads included; CPU measured, CUDA estimated
    read -r was _ <"$venv.stamp" || was=
    if [[ -d $venv && -n $(ls -A "$venv") ]]; then  # not ours, or the other device's and in use: keep it
        [[ -n $was ]] || die "$venv is there and not made by setup.sh. Move it away, choose another place" \
            "with GRPO_VENV=dir, or use it as it is with GRPO_PYTHON=$venv/bin/python"
        [[ $was == "$GRPO_DEVICE" ]] || die "$venv holds the $was packages, this run needs $GRPO_DEVICE." \
            "Remove it, or choose another place for these: GRPO_VENV=.venv-$GRPO_DEVICE"
    fi
    python=$(find_python)
    echo "$GRPO_DEVICE unfinished" >"$venv.stamp"
    rm -rf "$venv"
    [[ $GRPO_DEVICE == cpu ]] || need=16
    free=$(($(df -Pk "$(dirname "$venv")" | awk 'NR == 2 {print $4}') / 1000000))
    ((free >= need)) || die "needs $need GB of disk for $venv, has $free. Free some, or set GRPO_VENV=dir"
    say "installing the packages of $lock with $python into $venv (once, some minutes)"
    "$python" -m venv "$venv" || die "$python could not make a virtual environment in $venv"
    torch=$(grep '^torch==' "$lock")
    # The CPU build is not on PyPI: where pip's own places lack it too, PyTorch's index is asked, for it alone.
    pip_install "$torch" || { [[ $GRPO_DEVICE == cpu ]] && say "no $torch there, trying PyTorch's index" &&
        pip_install --index-url https://download.pytorch.org/whl/cpu "$torch"; } || failed
    pip_install -r "$lock" || failed
    stamp >"$venv.stamp"
    say "done: $(du -sh "$venv" | cut -f1) in $SECONDS s"
}

failed() {
    grep -i '^error' "$venv/install.log" | tail -2 | cut -c1-300 >&2
    die "pip failed. No network, or no way to a package index? See $venv/install.log, then run this again."
}

[[ $(uname -s) == Linux ]] || die "Linux only (vLLM's wheels are); elsewhere, use a Linux container"
cd "$(dirname "${BASH_SOURCE[0]}")"
if [[ -z ${GRPO_DEVICE:-} ]]; then
    if nvidia-smi -L >/dev/null 2>&1; then GRPO_DEVICE=cuda; else GRPO_DEVICE=cpu; fi
fi
lock=requirements/$GRPO_DEVICE.txt
[[ -f $lock ]] || die "GRPO_DEVICE must be cpu or cuda, not '$GRPO_DEVICE'"
if [[ -n ${GRPO_PYTHON:-} ]]; then
    PYTHON=$(command -v "$GRPO_PYTHON") || die "GRPO_PYTHON=$GRPO_PYTHON is not a program"
else
    venv=$(realpath -m "${GRPO_VENV:-.venv}")
    if ! ready; then
        mkdir -p "$(dirname "$venv")"
        (   # one at a time; whoever waited finds it done
            flock -n 9 || { say "waiting for another set-up of $venv"; flock 9; }
            ready || install
        ) 9>>"$venv.stamp"
    fi
    # shellcheck disable=SC2034  # for the script that sources this one
    PYTHON=${venv#"$PWD/"}/bin/python
fi
