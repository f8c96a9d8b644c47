#!/usr/bin/env bash
# Everything that needs a GPU, on one machine with one, in at most 9 minutes and one command:
#
#     bash bench/gpu.sh            GRPO_PYTHON: its Python (default python3); OUT: where results go (default bench/results)
#     bash bench/gpu.sh --cpu      the same course on a CPU, tiny: whether the scripts work
#
# No network is needed. Other heads come from .gpu/peers (bench/pack_peers.sh), a slim vLLM from .gpu/1 (its install.sh)
# or the Python; what is not there is reported as absent. Every result is written as it ends, each item has a time limit
# of its own, and an item that fails does not end the others. Exit code 1: a check failed or an item broke off.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${GRPO_PYTHON:-python3}
dry=()
[[ ${1:-} == --cpu || -n ${GRPO_GPU_DRY:-} ]] && dry=(--dry)
out=${OUT:-bench/results/gpu_$(date +%F)}
mkdir -p "$out"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
# what the slim vLLM leaves out
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 VLLM_HOST_IP=127.0.0.1
shapes=(32768,1536,151936 32768,4096,151936 8192,1536,151936 8192,2048,151936 8192,4096,151936 4096,4096,128256)
main=32768,2048,151936
if ((${#dry[@]})); then
    export TRITON_INTERPRET=${TRITON_INTERPRET:-1} CUDA_VISIBLE_DEVICES=
    shapes=(32,64,259) main=64,128,515
fi
status=0

item() {  # NAME SECONDS COMMAND...: its output goes to the log; past its time, or the whole course's, it is killed
    local name=$1 limit=$2 left=$((535 - SECONDS)) begun=$SECONDS code=0
    shift 2
    ((${#dry[@]})) && left=900 limit=900
    ((limit < left)) || limit=$left
    if ((limit < 10)); then echo "$name: no time left" | tee -a "$out/gpu.log"; status=1; return; fi
    echo "== $name: $*" >>"$out/gpu.log"
    timeout -k 5 "$limit" "$@" >>"$out/gpu.log" 2>&1 </dev/null || code=$?
    ((code == 0)) || status=1
    echo "$name: exit code $code, $((SECONDS - begun)) s" | tee -a "$out/gpu.log"
}

{ date; nvidia-smi; } >>"$out/gpu.log" 2>&1
item "correctness" 120 "$python" -m bench.gpu_check "${dry[@]}"
item "heads $main" 170 "$python" -m bench.head "${dry[@]}" --shapes "$main" --out "$out/head.jsonl"
item "training step" 80 "$python" -m bench.train_step "${dry[@]}" --out "$out/train_step.jsonl"

[[ -f .gpu/1/install.sh && ${#dry[@]} == 0 ]] && eval "$(sh .gpu/1/install.sh)"
if "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vllm") is None)'; then
    item "engine" 90 "$python" -m bench.gpu_smoke "${dry[@]}" --out "$out/smoke.jsonl"
    logs=$(mktemp -d)
    smoke=("logger.log_dir=$logs" checkpointing.enabled=false policy.generation.vllm_cfg.enforce_eager=true)
    if ((${#dry[@]})); then smoke+=(grpo.max_num_steps=2 grpo.max_val_samples=20)
    else smoke+=(policy.precision=bfloat16 grpo.logp_gap_limit=0.1 policy.generation.vllm_cfg.gpu_memory_utilization=0.3); fi
    item "smoke run" 70 "$python" grpo.py configs/smoke.yaml "${smoke[@]}"
    cat "$logs"/exp_*/metrics.jsonl >"$out/smoke_run.jsonl" 2>>"$out/gpu.log"
else
    echo "engine, smoke run: absent (no vllm here)" | tee -a "$out/gpu.log"
fi
for shape in "${shapes[@]}"; do
    ((SECONDS < 450 || ${#dry[@]})) || break
    item "heads $shape" $((510 - SECONDS)) "$python" -m bench.head "${dry[@]}" --rounds 5 --shapes "$shape" --out "$out/head.jsonl"
done

echo
{
    grep -E "^(PASS|FAIL)" "$out/gpu.log" | sed -E 's/^(PASS|FAIL).*/\1/' | sort | uniq -c
    grep -E "^FAIL" "$out/gpu.log"
    "$python" -m bench.head --table "$out/head.jsonl"
    cut -c1-600 "$out/train_step.jsonl"
    cat "$out/smoke.jsonl" 2>/dev/null
    tail -n1 "$out/smoke_run.jsonl" 2>/dev/null | cut -c1-1500
    echo "$SECONDS s in all; everything is in $out"
} 2>&1 | tee "$out/table.txt"
exit $status
