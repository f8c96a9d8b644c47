"""Tokens go between ranks as arrays: to the bit what they were as objects, in as many collectives on any number of
ranks.

Ranks draw, grade, exchange and pack the samples of steps, of an engine whose replies are a function of the seed. Each
gives what it would train on (a hash of each pack), log and show, by case, and which collectives that takes; and the
same for samples that all ranks have got pickled, as objects. And a step of grpo.main is replayed on two ranks.
"""

import hashlib
import os
import sys
from dataclasses import fields, replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fakes import FakeEngine
from ranks import ranks
from safetensors.numpy import load_file
from small_run import ROOT, arguments, write_rows

import config
import envs
import grpo
import replay
from advantages import step_advantages
from base.hf import turns
from base.inputs.mixing import Mixture
from base.inputs.scan import Dataset
from base.system.exchange import holders_of, move_to_log, move_tokens, send_tokens, without_tokens
from base.system.ranks import gather, start_process_group
from metrics import sample_metrics, summarize
from pack import assign_to_ranks, make_minibatches, pack_samples, rows_of
from records import TOKEN, Problem, Sample, TokenSequence, groups_of, make_tokens
from rollout import Sampler, sample_step
from run import steps as steps_module

CPU = torch.device("cpu")
STEP = 5
LIMIT = 40
RUNS = [(1, 1), (2, 1), (4, 2)]  # ranks, and ranks of an engine
REPLAYED = ("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false", "logger.dump_rollouts=1")
REPLAYED += ("checkpointing.save_hf_at_end=false", "logger.tensorboard_enabled=false", "grpo.max_num_steps=2")
REPLAYED += ("policy.train_global_batch_size=16", "policy.ppo_epochs=2", "policy.sequence_packing.train_mb_tokens=100")
REPLAYED += ("checkpointing.save_period=1",)


def seeded(seed, options):
    """Length, ids, log-probabilities and versions by the seed."""
    rng = np.random.default_rng(seed)
    length = min(int(rng.geometric(0.06)), LIMIT)
    ids, logps = rng.integers(0, 1000, length), -rng.random(length)
    versions = np.sort(rng.integers(STEP - 3, STEP, length))
    return np.int32(ids), np.float32(logps), "length" if length == LIMIT else "stop", np.int32(versions)


class Text:
    """Ids as text."""

    def decode(self, ids):
        return " ".join(map(str, ids))


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
            for field in fields(micro):
                value = getattr(micro, field.name)
                if field.name == "layout":
                    value = {"bounds": value.bounds, "prefixes": value.prefixes, "experts": value.experts_TLA}
                for part in value.values() if isinstance(value, dict) else [value]:
                    array = part.numpy() if isinstance(part, torch.Tensor) else np.asarray(part)
                    content.update(f"{field.name} {array.dtype} {array.shape}".encode())
                    content.update(array.tobytes() if part is not None else b"")
            hashes.append(content.hexdigest())
    return hashes


def pickled(samples):
    """The same samples with all tokens on all ranks, as objects, and numbers counted from the tokens."""
    here = []
    for s, holder in zip(samples, holders_of(s.sequence for s in samples), strict=True):
        if holder == dist.get_rank():
            counted_anew = replace(s.sequence, holder=None, num_output_tokens=0, num_mask_tokens=0)
            here.append(replace(s, sequences=[counted_anew]))
    return sorted((sample for share in gather(here) for sample in share), key=lambda s: (s.prompt, s.index))


def answer_of(trained, generated, cfg, ranks):
    adv_B, metrics = step_advantages(trained, cfg.grpo, cfg.loss_fn)
    minibatches = make_minibatches(trained, adv_B, cfg, ranks, CPU)
    names = "row_id index grade finish_reason oldest_version".split()
    logged = trained[: cfg.logger.num_samples_to_log]
    move_to_log(logged, None)
    shown = logged if ranks.rank == 0 else []
    return {
        "packs": hashes_of(minibatches),
        "metrics": sample_metrics(generated, trained) | metrics,
        "adv": adv_B,
        "shown": [[s.sequence.token_ids, *(getattr(s, name) for name in names)] for s in shown],
        "validation": summarize(groups_of(generated)),
    }


def run_case(ranks, cfg, num_turns, spread):
    sampler = Sampler(FakeEngine(seeded), Text(), {"a": Judge(spread), "b": Judge(spread)}, ranks, num_turns)
    mixture = Mixture([Dataset("rows.jsonl", problems(), "", "rows")], cfg)
    three_ids = mock.patch.object(turns, "observation_ids", lambda *_: [7, 8, 9])
    with Collectives() as collectives, three_ids:
        step = sample_step(sampler, cfg, mixture, mixture.start(), STEP, STEP)
        trained, generated = (pickled(samples) for samples in (step.trained, step.generated))
        for sample in trained:
            is_cut = cfg.grpo.overlong_filtering and sample.finish_reason == "length"
            sample.is_filtered = is_cut or not sample.grade.is_valid
        del collectives.seen[-2:]  # of `pickled`
        arrays = answer_of(step.trained, step.generated, cfg, ranks)
    return {"arrays": arrays, "objects": answer_of(trained, generated, cfg, ranks), "collectives": collectives.seen}


def answers_of_rank(tp_size):
    place, _ = start_process_group(tp_size)
    return {name: run_case(place, *case) for name, case in CASES.items()}


def state_of(metrics, model, optimizer):
    """This rank's rows of the weights and moments, and the metrics."""
    tensors = {}
    for name, param in model.named_parameters():
        of_param = {"weight": param, **optimizer.state[param]}
        tensors |= {f"{name}/{key}": getattr(x, "to_local", x.clone)().detach() for key, x in of_param.items()}
    return tensors, metrics


@ranks(2, stand_in=True)
def train(folder):
    """What a run of grpo.main leaves of each rank."""
    states, finish = [], steps_module.finish

    def note(run):
        states.append(state_of(run.metrics, run.model, run.optimizer))
        return finish(run)

    os.chdir(ROOT)
    sys.argv = ["grpo.py", *arguments(folder), *REPLAYED]
    with mock.patch.object(steps_module, "finish", note):
        assert grpo.main() == 0
    return states[0]


@ranks(2, stand_in=True)
def train_again(dump):
    """What a replay of the step leaves of each rank."""
    os.chdir(ROOT)
    again = replay.replay(dump, replay.read_config(dump, []), *start_process_group(1))
    return state_of(again.metrics, again.model, again.optimizer)


@pytest.fixture(scope="module")
def runs():
    """(ranks, ranks of an engine) -> by rank: case -> its answers."""
    return {(size, tp): ranks(size, stand_in=True)(answers_of_rank)(tp) for size, tp in RUNS}


@pytest.mark.parametrize("run", RUNS)
def test_packs_and_numbers_are_those_of_pickled_samples(runs, run):
    for rank in runs[run]:
        for case, answers in rank.items():
            assert answers["arrays"] == answers["objects"], case


def test_all_ranks_decide_alike_on_any_number_of_ranks(runs):
    (alone,) = runs[1, 1]
    for run in RUNS[1:]:
        for number, rank in enumerate(runs[run]):
            for case in rank:
                rank[case]["arrays"]["metrics"].pop("idle_engine_fraction", None)  # of several engines
                for name in ("metrics", "adv", "validation"):
                    assert rank[case]["arrays"][name] == alone[case]["arrays"][name], (run, case, name)
                shown = [] if number else alone[case]["arrays"]["shown"]
                assert rank[case]["arrays"]["shown"] == shown  # rank 0 has the tokens that it logs
    packs = [len({p for rank in runs[run] for p in rank["plain"]["arrays"]["packs"]}) for run in RUNS]
    assert packs == [7, 8, 8]  # and no pack is empty, or there twice


def test_the_collectives_of_a_step_do_not_depend_on_ranks_or_samples(runs):
    """Whether to stop, the samples without tokens, the tokens: these move once."""
    for (_, tp), its in runs.items():
        for rank in its:
            for case, answers in rank.items():
                turns = 2 if case in ("two turns", "minibatches", "gdpo") else 1 + 2 * (case == "turn advantages")
                verdicts = [name for name in answers["collectives"] if name == "broadcast_object_list"]
                assert (len(verdicts) >= turns) if tp > 1 else not verdicts, case  # as results come
                exchange = ["all_reduce", "all_gather_object", "all_to_all_single", "all_to_all_single"]
                assert answers["collectives"] == verdicts + exchange, case


def test_who_packs_tokens_that_never_came_is_told():
    sample = Sample(0, 0, 0, [TokenSequence([5, 7], holder=3, num_output_tokens=2)])
    with pytest.raises(AssertionError, match="tokens of group 0 are not here"):
        pack_samples([rows_of([sample])], 10)


NUM_TRAINERS, JOB_SIZE = 48, 64


def rows_of_job(rank):
    """32 groups of 8, of which 16 generators hold the tokens, as a rank has them. None: as if one had all."""
    rng = np.random.default_rng(0)
    samples = []
    for number in range(256):
        length = int(rng.integers(1, 400))
        holder = NUM_TRAINERS + number % (JOB_SIZE - NUM_TRAINERS)
        tokens = make_tokens(rng.integers(0, 1000, length), logp=-rng.random(length), version=number, mask=True)
        sample = Sample(number // 8, number % 8, 0, sequences=[TokenSequence([5, 7], tokens, holder=holder)])
        samples.append(sample if rank in (None, holder) else without_tokens(sample))
    return rows_of(samples)


def sent_to_trainers(rank, wires):
    """(the rows of a rank of a split job after `send_tokens`, those that it trains, the bytes that it got). wires:
    (from, to) -> bytes, of all ranks; those of this rank are added."""
    group = SimpleNamespace(rank=lambda: rank, size=lambda: JOB_SIZE)
    rows = rows_of_job(rank)
    shares = [[row for part in share for row in part] for share in assign_to_ranks(rows, NUM_TRAINERS, 500, True)]
    num_bytes = []

    def all_to_all(incoming, outgoing, bytes_in, bytes_out, of_group):
        assert of_group is group
        ends = np.cumsum(bytes_out)
        for other, part in enumerate(np.split(outgoing.numpy(), ends[:-1])):
            wires[rank, other] = part
        received = [wires.get((other, rank), np.zeros(size, np.uint8)) for other, size in enumerate(bytes_in)]
        assert [len(part) for part in received] == bytes_in
        incoming[:] = torch.from_numpy(np.concatenate(received))
        num_bytes.append(sum(bytes_in))

    with mock.patch.object(dist, "all_to_all_single", all_to_all):
        send_tokens([[row.sequence for row in share] for share in shares], group)
    return rows, shares[rank] if rank < NUM_TRAINERS else [], num_bytes


def test_in_a_split_job_no_rank_gets_what_it_does_not_train():
    """64 ranks, one after the other: in a second round each gets what all have sent in the first."""
    wires, whole, trained = {}, rows_of_job(None), set()
    for rank in range(JOB_SIZE):
        sent_to_trainers(rank, wires)
    for rank in range(JOB_SIZE):
        rows, mine, num_bytes = sent_to_trainers(rank, wires)
        assert num_bytes == [TOKEN.itemsize * sum(row.sequence.num_output_tokens for row in mine)]
        here = {id(row.sequence) for row in mine}
        for row, original in zip(rows, whole, strict=True):
            if id(row.sequence) in here:
                assert (row.sequence.tokens == original.sequence.tokens).all()
                trained.add((row.sample.prompt, row.sample.index))
            elif row.sequence.holder != rank:
                assert len(row.sequence.tokens) == 0
    assert len(trained) == 256


def test_nothing_moves_where_all_ranks_have_all_tokens():
    """Without a process group, too."""
    move_tokens([[TokenSequence([5], make_tokens([0, 0]))]])
    move_tokens([])


def test_a_step_replayed_on_as_many_ranks_is_the_same_to_the_bit(tmp_path):
    """Each rank has dumped a part of the samples, and reads all of them."""
    write_rows(tmp_path)
    dump = tmp_path / "exp_001" / "rollouts" / "step_000002"
    trained, again = train(tmp_path), train_again(dump)
    parts = [load_file(dump / f"rank_00{rank}.safetensors")["sample_S"] for rank in range(2)]
    assert sorted(np.concatenate(parts)) == list(range(32)) and min(map(len, parts)) > 0
    for (tensors, metrics), (replayed, numbers) in zip(trained, again, strict=True):
        assert tensors.keys() == replayed.keys() and len(tensors) > 30 and len(numbers) > 30
        assert numbers == {name: metrics[name] for name in numbers}
        assert all(torch.equal(tensors[name], replayed[name]) for name in tensors)
