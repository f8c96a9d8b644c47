"""Ranks that draw, grade, exchange and pack the samples of steps: exchange_worker.py FOLDER

The engine is a stand-in whose replies are a function of the seed. One process forks 1, 2 and 4 ranks. Each writes what
it would train on (a hash of each pack), log and show, by case, and which collectives that takes; and the same for
samples that all ranks have got pickled, as objects. Then what a run of grpo.main leaves, and a replay of its last step.
"""

import hashlib
import json
import os
import socket
import sys
import traceback
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import fake_vllm

fake_vllm.install()
import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from small_run import arguments, write_rows

import config
import envs
import grpo
from advantages import step_advantages
from batch import make_minibatches
from data import Problem, groups_of
from dataset.mixing import Mixture
from dataset.scan import Dataset
from engine import Completion, check_versions
from metrics import sample_metrics
from rollout import Sampler, sample_step
from run import steps as steps_module
from run.validation import summarize
from system.exchange import move_tokens
from system.ranks import gather, start_process_group
from tools import replay

CPU = torch.device("cpu")
STEP = 5
LIMIT = 40
RUNS = [(1, 1), (2, 1), (4, 2)]  # ranks, and ranks of an engine
REPLAYED = ("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false", "logger.dump_rollouts=1")
REPLAYED += ("checkpointing.save_hf_at_end=false", "logger.tensorboard_enabled=false", "grpo.max_num_steps=2")
REPLAYED += ("policy.train_global_batch_size=16", "policy.ppo_epochs=2", "policy.sequence_packing.train_mb_tokens=100")
REPLAYED += ("checkpointing.save_period=1",)


class SeededEngine:
    """Lengths, ids, log-probabilities and versions by the seed."""

    max_total_tokens, is_idle = 120, True

    def __init__(self):
        self.unclaimed = {}

    def start(self, prompts, seeds, options, priority=0):
        self.unclaimed |= {str(seed): self.reply(seed) for seed in seeds}
        return [str(seed) for seed in seeds]

    def advance(self, requests):
        return [*requests]

    def reply(self, seed):
        rng = np.random.default_rng(seed)
        length = min(int(rng.geometric(0.06)), LIMIT)
        ids, logps = rng.integers(0, 1000, length), -rng.random(length)
        versions = np.sort(rng.integers(STEP - 3, STEP, length))
        reason = "length" if length == LIMIT else "stop"
        return Completion(np.int32(ids), np.float32(logps), reason, np.int32(versions))


class Text:
    """Ids as text; an observation is three ids."""

    def decode(self, ids):
        return " ".join(map(str, ids))

    def observation_ids(self, messages, reply_ids, observation, tools):
        return [7, 8, 9]


class Judge(envs.Environment):
    """Every outcome that there is, by the reply; some conversations have a second turn."""

    reward_names = ("first", "second")

    def __init__(self, spread):
        self.spread = spread

    def step(self, turns):
        return [self.judge(turn) for turn in turns]

    def judge(self, turn):
        ids = list(map(int, turn.messages[-1]["content"].split()))
        number = sum(ids) % self.spread
        rewards = {"first": number / 3, "second": float(len(ids) % 2)}
        outcome = envs.OUTCOMES[min(number, 4)]
        done = ids[0] % 3 > 0
        extracted = None if number == 2 else f"answer {number} of a reply that is longer than a few letters"
        observation = () if done else ({"role": "user", "content": "again"},)
        return envs.StepResult(sum(rewards.values()), outcome, done, observation, {}, rewards, extracted)


def problems():
    rng = np.random.default_rng(1)
    rows = []
    for i in range(64):
        ids = rng.integers(0, 1000, rng.integers(1, 50)).tolist()
        rows.append(Problem(i, [], "", "ab"[i % 2], ids, {}, float(i % 7 != 3), "even" if i % 2 else ""))
    return rows


def config_of(grpo=None, max_tokens=128, share_prefix=True, batch=None):
    packing = config.SequencePackingConfig(train_mb_tokens=max_tokens, share_prefix=share_prefix)
    generation = config.GenerationConfig(max_new_tokens=LIMIT)
    policy = config.PolicyConfig(sequence_packing=packing, generation=generation, train_global_batch_size=batch)
    options = {"num_prompts_per_step": 8, "num_generations_per_prompt": 6} | (grpo or {})
    return config.Config(policy=policy, grpo=config.GRPOConfig(**options), data=config.DataConfig(shuffle=False))


SHAPING = config.RewardShapingConfig(enabled=True, overlong_buffer_length=20)
CASES = {  # name -> (config, turns, different rewards)
    "plain": (config_of(), 1, 5),
    "alone": (config_of(share_prefix=False), 1, 5),
    "two turns": (config_of({"overlong_filtering": True}), 2, 5),
    "turn advantages": (config_of({"turn_level_advantages": True, "overlong_filtering": True}), 3, 5),
    "minibatches": (config_of(batch=16, max_tokens=200), 2, 5),
    "dynamic": (config_of({"use_dynamic_sampling": True, "batch_multiplier": 1.5, "reward_shaping": SHAPING}), 1, 2),
    "gdpo": (config_of({"adv_estimator": config.AdvEstimatorConfig(name="gdpo")}), 2, 5),
    "few": (config_of({"num_prompts_per_step": 1, "num_generations_per_prompt": 2}), 1, 5),
}


class Collectives:
    """The name of each call of torch.distributed, while it is entered."""

    NAMES = ("all_reduce", "all_to_all_single", "all_gather", "all_gather_object", "broadcast_object_list", "broadcast")

    def __enter__(self):
        self.seen, self.originals = [], {name: getattr(dist, name) for name in self.NAMES}
        for name, original in self.originals.items():
            setattr(dist, name, self.counted(name, original))
        return self

    def counted(self, name, original):
        def call(*args, **options):
            self.seen.append(name)
            return original(*args, **options)

        return call

    def __exit__(self, *_):
        for name, original in self.originals.items():
            setattr(dist, name, original)


def hashes_of(minibatches):
    """One for each micro-batch."""
    hashes = []
    for minibatch in minibatches:
        for micro in minibatch.micros:
            content = hashlib.sha256(str(minibatch.num_input_tokens).encode())
            for each in (each for each in fields(micro) if each.name != "layout"):  # of cu_seqlens and prefix_S
                value = getattr(micro, each.name)
                array = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
                content.update(f"{each.name} {array.dtype} {array.shape}".encode())
                content.update(array.tobytes() if value is not None else b"")
            hashes.append(content.hexdigest())
    return hashes


def pickled(samples, rank):
    """The same samples with all tokens on all ranks, as objects, and numbers counted from the tokens."""
    here = [replace(s, holder=None, num_output_tokens=0, num_trained_tokens=0) for s in samples if s.holder == rank]
    return sorted((sample for share in gather(here) for sample in share), key=lambda s: (s.prompt, s.index))


def answer_of(trained, generated, cfg, ranks):
    check_versions(trained, STEP - 1, 3)
    adv_B, metrics = step_advantages(trained, cfg.grpo, cfg.loss_fn)
    minibatches = make_minibatches(trained, adv_B, cfg, ranks, CPU)
    move_tokens([trained[: cfg.logger.num_samples_to_log]])  # as run.steps.end_step does for the log
    names = "prompt_ids row_id index reward unshaped_reward outcome finish_reason weight_version num_tokens".split()
    shown = trained[: cfg.logger.num_samples_to_log] if ranks.rank == 0 else []
    return {
        "packs": hashes_of(minibatches),
        "metrics": sample_metrics(generated, trained) | metrics,
        "adv": adv_B,
        "shown": [[s.output_ids.tolist(), *(getattr(s, name) for name in names)] for s in shown],
        "validation": summarize(groups_of(generated)),
    }


def run_case(ranks, cfg, num_turns, spread):
    sampler = Sampler(SeededEngine(), Text(), {"a": Judge(spread), "b": Judge(spread)}, ranks, num_turns)
    mixture = Mixture([Dataset("rows.jsonl", problems(), "", "rows")], cfg)
    with Collectives() as collectives, mock.patch("rollout.check_versions"):  # `answer_of` allows more ages
        step = sample_step(sampler, cfg, mixture, mixture.start(), STEP, STEP)
        trained, generated = (pickled(samples, ranks.rank) for samples in (step.trained, step.generated))
        for sample in trained:
            is_cut = cfg.grpo.overlong_filtering and sample.finish_reason == "length"
            sample.num_trained_tokens *= sample.is_graded and not is_cut
        del collectives.seen[-2:]  # of `pickled`
        arrays = answer_of(step.trained, step.generated, cfg, ranks)
    return {"arrays": arrays, "objects": answer_of(trained, generated, cfg, ranks), "collectives": collectives.seen}


def main(folder, tp_size):
    ranks, _ = start_process_group(tp_size)
    answers = {name: run_case(ranks, *case) for name, case in CASES.items()}
    (folder / f"{ranks.world_size}_{tp_size}_{ranks.rank}.json").write_text(json.dumps(answers))
    dist.barrier()


def write_state(folder, name, metrics, model, optimizer):
    """This rank's rows of the weights and moments, and the metrics."""
    tensors = {}
    for param_name, param in model.named_parameters():
        of_param = {"weight": param, **optimizer.state[param]}
        tensors |= {f"{param_name}/{k}": getattr(x, "to_local", x.clone)().detach() for k, x in of_param.items()}
    save_file(tensors, folder / f"{name}_{dist.get_rank()}.safetensors")
    (folder / f"{name}_{dist.get_rank()}.json").write_text(json.dumps(metrics))


def train_again(folder):
    """Writes what a replay of the last step leaves of this rank."""
    dump = folder / "exp_001" / "rollouts" / "step_000002"
    _, *left = replay.replay(dump, replay.read_config(dump, []), *start_process_group(1))
    write_state(folder, "again", *left)


def train(folder, name, words):
    """Writes what a run of grpo.main leaves of this rank."""

    def finish(run):
        write_state(folder, name, run.metrics, run.model, run.optimizer)
        return FINISH(run)

    FINISH, steps_module.finish = steps_module.finish, finish
    sys.argv = ["grpo.py", *words]
    assert grpo.main() == 0


def start(rank, size, port, work, *given):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(size))
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
        work(*given)
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def launch(size, *work):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    pids = [start(rank, size, port, *work) for rank in range(size)]
    if any([os.waitpid(pid, 0)[1] for pid in pids]):
        sys.exit(1)


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parents[2])
    results = Path(sys.argv[1])
    for size, tp_size in RUNS:
        launch(size, main, results, tp_size)
    folder = results / "replay"
    folder.mkdir()
    write_rows(folder)
    launch(2, train, folder, "run", [*arguments(folder), *REPLAYED])
    launch(2, train_again, folder)
