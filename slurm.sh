#!/usr/bin/env bash
# Training on several nodes under Slurm, from a copy of this repository on a disk that all nodes share:
#
#     sbatch --nodes=4 slurm.sh configs/math_8b.yaml [key.sub=value ...]
#
# Each node runs ./train.sh and logs to slurm-<job>-<node>.log; run folders must be on the shared disk too. Before the
# time limit the run is told to save, and the job is queued again. The next part resumes the newest run of logger.log_dir
# that has a checkpoint (resume=auto), so give each job a log_dir of its own.
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

read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")  # not `| head -1`: scontrol may die of the closed pipe
export ENDPOINT=$head:$((29500 + SLURM_JOB_ID % 1000))  # jobs that share a node get different ports
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

echo "slurm.sh: part $((${SLURM_RESTART_COUNT:-0} + 1)) ended with exit code $status" >&2
if ((status == 75)) && [[ -z $cancelled ]]; then  # saved, with steps left
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
