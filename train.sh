#!/usr/bin/env bash
usage() {
    cat <<'USAGE'
Usage: ./train.sh [--nproc_per_node=N] [--gpu_memory=GiB] [CONFIG.yaml] [key.sub=value ...]
       ./train.sh --nnodes=N --node_rank=K --rdzv_endpoint=HOST:PORT ...    on each of N nodes (docs/scale.md)

Sets up on a fresh machine, checks the config, then trains under torchrun.
Default config: configs/smoke.yaml (CPU, minutes). Every key: .venv/bin/python grpo.py --help
--gpu_memory: plan for a GPU with this much memory, instead of the GPU found here.
--nnodes, --node_rank (0 to N-1), --rdzv_endpoint (a port of node 0): by slurm.sh. They wait 10 minutes for each other.
Processes per node: --nproc_per_node or NPROC; default: one per GPU; on CPU 2 for a small model, 1 for a large one.
GRPO_DEVICE, GRPO_VENV and GRPO_PYTHON choose the environment: see setup.sh.

Ctrl-C, SIGTERM and SIGUSR1 are passed on to the run. Exit codes: 0 done; 1 set-up failed, or a crash; 2 bad config, data
or model folder; 3 a check of the run failed; 4 hung; 5 out of memory; 75 saved on a signal. The last line says why.
USAGE
}
set -euo pipefail

complain() { echo "train.sh: $*" >&2; exit 2; }

config=configs/smoke.yaml
nproc=${NPROC:-}
args=()
memory=()
declare -A nodes=()  # options of a run on several nodes
while (($#)); do
    case $1 in
        -h|--help) usage; exit 0 ;;
        --nproc_per_node=*|--nproc-per-node=*) nproc=${1#*=} ;;
        --nproc_per_node|--nproc-per-node) nproc=${2:-nothing}; (($# == 1)) || shift ;;
        --nnodes=*|--node[_-]rank=*|--rdzv[_-]endpoint=*|--nnodes|--node[_-]rank|--rdzv[_-]endpoint)
            name=${1%%=*}
            [[ $1 == *=* ]] || { (($# > 1)) || complain "$1 needs a value"; set -- "$1=$2" "${@:3}"; }
            nodes[${name//-/_}]=${1#*=} ;;
        --gpu_memory=*) memory=("$1") ;;
        -*) complain "unknown option $1 (./train.sh --help)" ;;
        *) args+=("$1") ;;
    esac
    shift
done
set -- "${args[@]}"
if [[ $# -gt 0 && $1 != *=* ]]; then
    config=$1; shift
    [[ -f $config && ! . -ef "$(dirname "$0")" ]] && config=$(realpath "$config")  # setup.sh changes the folder
fi

# shellcheck source=setup.sh
source "$(dirname "$0")/setup.sh"

if [[ -z $nproc && ($GRPO_DEVICE != cpu || ${#nodes[@]} -gt 0) ]]; then
    if [[ $GRPO_DEVICE == cpu ]]; then nproc=2
    elif [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then nproc=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)
    else nproc=$(nvidia-smi -L | grep -c '^GPU' || true); fi
fi
[[ $nproc =~ ^([1-9][0-9]*)?$ ]] || complain "the number of processes must be 1 or more, not '$nproc'"

num_nodes=1
rendezvous=(--standalone --local_addr=127.0.0.1)  # a free port; a container may not resolve its own name
if ((${#nodes[@]})); then
    num_nodes=${nodes[__nnodes]:-} node_rank=${nodes[__node_rank]:-} endpoint=${nodes[__rdzv_endpoint]:-}
    [[ $num_nodes =~ ^[1-9][0-9]*$ && $node_rank =~ ^(0|[1-9][0-9]*)$ && $endpoint =~ ^.+:[0-9]+$ ]] &&
        ((node_rank < num_nodes)) || complain "each node needs --nnodes=N, --node_rank=K (0 to N-1) and the same" \
        "--rdzv_endpoint=HOST:PORT, of node 0; not '$num_nodes', '$node_rank', '$endpoint'"
    # is_host: node 0 hosts the endpoint even if the name does not resolve to the machine's own address.
    meeting="is_host=$((node_rank == 0)),join_timeout=600,read_timeout=600"
    rendezvous=(--nnodes="$num_nodes" --rdzv_backend=c10d --rdzv_endpoint="$endpoint" --rdzv_conf="$meeting"
        --max-restarts=0)  # the ranks of the other nodes would not restart
fi

trap '' PIPE  # whoever reads the output may leave (| head): that costs no run
# One process checks config, data and model folder in two seconds; N ranks would need a minute. What it finds out the run
# says again, and better: of all rows, of a resumed run, of the GPU that is there.
world=(-u WORLD_SIZE)
[[ -z $nproc ]] || world=("WORLD_SIZE=$((nproc * num_nodes))" "LOCAL_WORLD_SIZE=$nproc")
found=$(env "${world[@]}" "$PYTHON" grpo.py --check "$config" "$@" "${memory[@]}") ||
    { status=$?; printf '%s' "${found:+$found$'\n'}"; exit "$status"; }
if [[ -z $nproc ]]; then  # on a CPU the model decides
    layout=$(grep '^ranks ' <<<"$found")
    read -r _ nproc _ <<<"$layout"
    echo "$layout" || true
fi
# The check has fetched model and data for this node, so its ranks need not ask the hub all at once.
((num_nodes == 1)) || export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

export GRPO_PARENT=$$  # base/system/launch.py ends with it
# By default torchrun gives each rank one thread; with all cores for each rank, ranks are 30x slower.
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > nproc ? cores / nproc : 1))}
[[ $GRPO_DEVICE != cpu ]] || export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}  # vLLM warns of its NUMA binding
# After a signal the ranks finish their step and save; torchrun would kill them after 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
# --signals-to-handle: by default torchrun dies of SIGUSR1 and leaves orphans.
launch=("$PYTHON" -m base.system.launch "${rendezvous[@]}" --nproc_per_node="$nproc"
    --signals-to-handle="SIGTERM,SIGINT,SIGHUP,SIGUSR1" grpo.py "$config" "$@" "${memory[@]}")
printf -v line ' %q' "${launch[@]}"
settings="OMP_NUM_THREADS=$OMP_NUM_THREADS TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
echo "torchrun line: $settings${line//\\,/,}" || true

set -m  # a process group of its own: Ctrl-C reaches torchrun only through the trap, not also from the terminal
"${launch[@]}" </dev/null &
child=$!
set +m
for name in TERM INT HUP USR1; do
    # shellcheck disable=SC2064  # expands now
    trap "kill -$name $child 2>/dev/null || true" "$name"
done
while status=0; do
    wait "$child" || status=$?
    kill -0 "$child" 2>/dev/null || break  # if it lives, a signal ended `wait`
done

if ((status > 128)); then
    echo "train.sh: exit code 1: torchrun was killed by signal $((status - 128)); continue with checkpointing.resume=auto" >&2
    status=1
fi
exit "$status"
