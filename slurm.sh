#!/usr/bin/env bash
# Training on several nodes under Slurm, from a copy of this repository on a disk that all nodes share:
#
#     sbatch --nodes=4 slurm.sh configs/math_8b.yaml [key.sub=value ...]
#
# Each node runs ./train.sh and logs to slurm-<job>-<node>.log. The step lines are in the log of rank 0's node, whose
# full host name comes first in alphabetical order; slurm-<job>.log names it. Run folders must be on the shared disk, too.
# Before the time limit the run is told to save, and the job is queued again. So it is after a crash or a hang, but after
# at most three in a row without a new checkpoint. The next part resumes the newest run of logger.log_dir that has a
# checkpoint (resume=auto), so give each job a log_dir of its own.
#SBATCH --job-name=grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
# USR1 goes to this script 900 s before the limit: longer than a step and a checkpoint take (see `timing/`).
set -euo pipefail

# shellcheck source=setup.sh
source ./setup.sh

newest_step() {  # of the checkpoint that the next part would continue; 0 without one
    "$PYTHON" -m base.inputs.resume "$@" 2>/dev/null || echo 0
}

part=$((${SLURM_RESTART_COUNT:-0} + 1))
failures=slurm-$SLURM_JOB_ID.failures  # how many parts in a row have failed without a new checkpoint
step_before=$(newest_step "$@")
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")  # in the order in which Slurm numbers the nodes
read -r first < <(printf '%s\n' "${hosts[@]}" | LC_ALL=C sort)
for number in "${!hosts[@]}"; do
    if [[ ${hosts[number]} == "$first" ]]; then follow=slurm-$SLURM_JOB_ID-$number.log; fi
done
echo "slurm.sh: part $part starts after step $step_before; its step lines: tail -F $follow" >&2

export ENDPOINT=${hosts[0]}:$((29500 + SLURM_JOB_ID % 1000))  # jobs that share a node get different ports
cancelled=
trap 'cancelled=1' TERM  # by scancel, which signals the nodes itself
# --wait: after one node's part ends, the others have 120 s to say what they know.
# shellcheck disable=SC2016  # each node has its own SLURM_NODEID
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 --wait=120 \
    --open-mode=append --output="slurm-%j-%n.log" bash -c '
    export GRPO_HOST_NAME=$SLURMD_NODENAME
    exec ./train.sh --nnodes="$SLURM_NNODES" --node_rank="$SLURM_NODEID" --rdzv_endpoint="$ENDPOINT" "$@"
' train "$@" checkpointing.resume=auto &
step=$!

trap 'kill -USR1 "$step" || true' USR1
while status=0; do
    wait "$step" || status=$?
    kill -0 "$step" 2>/dev/null || break  # if it lives, a signal ended `wait`
done

step_after=$(newest_step "$@")
echo "slurm.sh: part $part ended after step $step_after with exit code $status" >&2
again=
if ((status == 75)); then  # saved, with steps left
    again=1
elif ((status == 1 || status == 4 || status == 137)); then  # a crash, a hang, or train.sh was killed
    count=0
    if ((step_after <= step_before)); then count=$(($(cat "$failures" 2>/dev/null || echo 0) + 1)); fi
    echo "$count" >"$failures"
    if ((count <= 3)); then again=1; fi
fi
if [[ -n $again && -z $cancelled ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
