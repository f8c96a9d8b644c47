"""Rollouts that agents lead, over vLLM: what becomes of them in samples, in a step and when they fail."""

import itertools
import json
import os
import socket
import sys
import time
import venv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from agent_case import TEMPERATURE, endpoint_of, sample, started
from dist_case import settings
from isolations import ISOLATIONS
from loop import train_once
from processes import command_lines

from base.system.exits import StopRun
from config import AgentConfig, ConfigError, LoggerConfig
from run.log import RunLog

pytestmark = pytest.mark.slow


@pytest.fixture
def case(served):
    served.endpoint = endpoint_of(served)
    yield served
    served.endpoint.shut_down()


def agent(name, **changes):
    return AgentConfig(**{"name": name, "num_workers": 4, "deadline_s": 30.0} | changes)


GOOD = agent("good", function="bad_agents:good")
TURNS = agent("turns", function="bad_agents:three_turns", reward_names=("near",))
COMMAND = agent("command", command=(sys.executable, "tests/helpers/agent_command.py"))


def test_agents_lead_conversations_of_their_own_kinds(case):
    inputs = [("good", "1+1"), ("turns", "2+2"), ("command", "3+3"), ("good", "4+4")]
    samples = sample(case, [GOOD, TURNS, COMMAND], inputs, turns={"near": 0.75})
    assert [(s.prompt, s.index) for s in samples] == [(i, j) for i in range(4) for j in range(2)]
    for s in samples:
        assert s.by_agent and s.grade.message == "" and s.oldest_version == 3 and s.num_turns == 1
        assert sum(row.tokens["mask"].sum() for row in s.sequences) == s.num_trained_tokens > 0
        turns = {}
        for row in s.sequences:
            turns |= zip(row.turns, row.turn_tokens, strict=True)
        assert sorted(turns) == list(range(s.num_calls)) and sum(turns.values()) == s.num_trained_tokens
        assert s.grade.turn_rewards == [s.grade.reward] * s.num_calls
    assert [s.num_calls for s in samples] == [1, 1, 3, 3, 2, 2, 1, 1]
    for s in samples[2:4]:
        assert (s.grade.reward, s.grade.outcome, s.grade.rewards) == (1.0, "wrong", {"near": 0.75})
        assert s.grade.extracted is not None
        assert len(s.sequences) >= 2  # it repeats only its last message: each call is a row of its own
    for s in samples[4:6]:
        assert (s.grade.reward, s.grade.outcome, len(s.sequences)) == (0.25, "ok", 1) and s.sequence.num_env_tokens > 0
    again = sample(case, [GOOD, TURNS, COMMAND], inputs, turns={"near": 0.75})
    for one, other in zip(samples, again, strict=True):
        assert one.grade.reward == other.grade.reward
        assert [row.token_ids for row in one.sequences] == [row.token_ids for row in other.sequences]
    assert case.engine.is_idle and not case.engine.unclaimed and not case.endpoint.rollouts


def test_another_interpreter_with_packages_and_variables_of_its_own(case, tmp_path, monkeypatch):
    venv.create(tmp_path / "venv", with_pip=False)
    monkeypatch.setenv("AGENT_SECRET", "s")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.chdir(Path(__file__).parents[1] / "helpers")  # where the user's modules are
    python = str(tmp_path / "venv" / "bin" / "python")
    own = agent("own", function="bad_agents:where_am_i", python=python, pass_env=("AGENT_SECRET",))
    [found] = sample(case, [own], [("own", "1+1")], num_samples=1, own={"prefix": str(tmp_path / "venv")})
    assert (found.grade.outcome, found.grade.reward) == ("ok", 1.0), found.grade.message
    for changes, named in (
        ({"python": "/no/python"}, "own.python=/no/python"),
        ({"pass_env": ("NOT_SET",)}, "own.pass_env: NOT_SET"),
        ({"function": "bad_agents:absent"}, "own.function=bad_agents:absent"),
        ({"function": "no_module:f"}, "own.function=no_module:f"),
        ({"function": None, "command": ("no-such-program",)}, "own.command=no-such-program"),
    ):
        with pytest.raises(ConfigError) as refused:
            started(replace(AgentConfig(name="own", function="bad_agents:good"), **changes))
        assert named in str(refused.value)
    with pytest.raises(ConfigError, match=r"own.function=bad_agents:good.*unexpected keyword"):
        started(AgentConfig(name="own", function="bad_agents:good"), {"near": 3})


def test_an_agent_elsewhere_and_few_that_start(case, tmp_path):
    """At another address of this machine, which answers this agent and nobody without a key."""
    begun = tmp_path / "times"
    changes = {"function": "bad_agents:slow_to_start", "max_starting": 1, "address": "127.0.0.2"}
    case.endpoint.shut_down()
    case.endpoint = None
    samples = sample(case, [agent("slow", **changes)], [("slow", "1+1")], num_samples=4, slow={"file": str(begun)})
    case.endpoint = endpoint_of(case)
    assert [s.grade.outcome for s in samples] == ["ok"] * 4
    assert all(s.grade.extracted.startswith("http://127.0.0.2:") for s in samples)
    times = sorted(json.loads(line) for line in begun.read_text().splitlines())
    for one, other in itertools.pairwise(times):
        assert other[0] >= one[1], "it starts when the one before has asked"
    assert times[1][0] < times[0][2], "and not when it has ended"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", case.endpoint.server.port), timeout=5)
    with pytest.raises(ConfigError, match=r"slow.address=192.0.2.1.*address of this machine"):
        started(agent("slow", function="bad_agents:good", address="192.0.2.1"))


SNOOP = """
import glob, json, os, sys, time, urllib.request
row, url = json.load(sys.stdin), os.environ["OPENAI_BASE_URL"]
body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
urllib.request.urlopen(url + "/chat/completions", body).read()

def works(call):
    try:
        return float(bool(call()))
    except OSError:
        return 0.0

read = lambda path: open(path, "rb").read()
is_other = lambda path: b"OPENAI_BASE" in read(path) and url.encode() not in read(path)
others = lambda: [path for path in glob.glob("/proc/[0-9]*/environ") if works(lambda: is_other(path))]
end = time.monotonic() + row["seconds"]  # until the other is there, too
while not others() and time.monotonic() < end:
    time.sleep(0.1)
found = {"file": works(lambda: read(row["secret"])), "others": works(others), "own": works(lambda: read(__file__))}
found["signal"] = works(lambda: os.kill(row["pid"], 0) is None)
found["scratch"] = works(lambda: open("/tmp/scratch", "w").write("x") and open("/dev/null").close() is None)
time.sleep(4.0)  # the other looks
print(json.dumps({"reward": 1, "rewards": found}))
"""


@pytest.mark.parametrize("isolation", sorted({*ISOLATIONS, "none"}))
def test_an_isolated_command_sees_neither_other_agents_nor_the_runs_files(case, tmp_path, isolation):
    secret, program = tmp_path / "logs" / "config.yaml", tmp_path / "agent" / "snoop.py"
    for path, text in ((secret, "x"), (program, SNOOP)):
        path.parent.mkdir()
        path.write_text(text)
    names = ("file", "others", "own", "signal", "scratch")
    snoop = agent("snoop", command=(sys.executable, str(program)), isolation=isolation, reward_names=names)
    row = {"secret": str(secret), "pid": os.getpid(), "seconds": 20 if isolation == "none" else 1}
    rows = [("snoop", row)] * 2
    for s in sample(case, [snoop], rows):
        free = float(isolation == "none")
        want = {"file": free, "others": free, "own": 1.0, "signal": free, "scratch": 1.0}
        assert (s.grade.outcome, s.grade.message, s.grade.rewards) == ("ok", "", want)
    Path("/tmp/scratch").unlink(missing_ok=isolation == "required")


BAD = {  # input -> (outcome, reward, whether it is trained, what the message says)
    "raises": ("crashed", 0, True, "RuntimeError: no luck"),
    "exits": ("crashed", 0, True, "3"),
    "dies": ("crashed", 0, True, "exit code 9"),
    "is killed": ("crashed", 0, True, "exit code -9"),
    "closes": ("crashed", 0, True, "closed its connection"),
    "hangs": ("timeout", 0, True, "no answer in 3 s"),
    "ignores": ("timeout", 0, True, "no answer"),
    "forks": ("timeout", 0, True, "no answer"),
    "leaves a child": ("ok", 1, True, ""),
    "never": ("error", 0, False, "never called"),
    "text": ("crashed", 0, True, "much"),
    "nan": ("error", 0, False, "finite"),
    "none": ("error", 0, False, "None"),
    "object": ("crashed", 0, True, "points"),
    "outcome": ("crashed", 0, True, "great"),
    "big prompt": ("ok", 1, True, ""),
    "broken json": ("ok", 1, True, ""),
    "many": ("ok", 1, True, ""),
}


def nobody_waits(server):
    """Its thread has yet to see who has gone."""
    end = time.monotonic() + 10
    while server.waiting and time.monotonic() < end:
        time.sleep(0.01)
    return not server.waiting


def test_bad_agents_end_as_documented_and_leave_nothing(case, capfd):
    begin = time.monotonic()
    bad = agent("bad", function="bad_agents:bad", deadline_s=3.0, max_calls=4, num_workers=18)
    samples = sample(case, [bad], [("bad", kind) for kind in BAD], num_samples=1)
    assert time.monotonic() - begin < 60
    for (kind, (outcome, reward, is_trained, said)), s in zip(BAD.items(), samples, strict=True):
        assert (s.grade.outcome, s.grade.reward) == (outcome, reward), (kind, s.grade.outcome, s.grade.message)
        assert s.grade.is_valid == is_trained and said in s.grade.message, (kind, s.grade.message)
        assert bool(s.grade.message) == (outcome != "ok"), kind
        assert (s.num_calls > 0) == (kind != "never") and (sum(row.num_mask_tokens for row in s.sequences) > 0) == (
            kind != "never"
        )
    assert samples[list(BAD).index("big prompt")].finish_reason == "length"
    assert samples[list(BAD).index("many")].num_calls == 4
    assert "sleep 987" not in command_lines()
    assert case.engine.is_idle and not case.engine.unclaimed and not case.endpoint.rollouts
    assert not case.endpoint.running and nobody_waits(case.endpoint.server)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.long
def test_a_thousand_calls_at_once(case):
    """More than max_calls are refused; what is under way at the deadline is dropped."""
    crowd = agent("crowd", function="bad_agents:bad", max_calls=4)
    late = agent("late", function="bad_agents:bad", max_calls=2000, deadline_s=6.0)
    begin = time.monotonic()
    first, second = sample(case, [crowd, late], [("crowd", "crowd"), ("late", "crowd that waits")], num_samples=1)
    assert time.monotonic() - begin < 30
    assert (first.grade.outcome, first.grade.reward, first.num_calls) == ("ok", 1, 4), first.grade.message
    assert (second.grade.outcome, second.grade.is_valid) == ("timeout", True) and 0 < second.num_calls <= 1001
    assert second.sequence.num_mask_tokens > 0 and case.engine.is_idle and not case.engine.unclaimed
    while not case.endpoint.server.inbox.empty():  # what came after the end of the rollout
        case.endpoint.before_step()
    assert not case.endpoint.running and nobody_waits(case.endpoint.server)


@pytest.mark.parametrize("function", ["scored_by_length", "scored_by_call"])
def test_a_rollout_of_several_rows_is_one_sample_in_its_group_and_all_its_tokens_are_trained(case, function):
    """Advantage, loss over tokens and gradient by a loop over rollouts, with transformers. A call that has a reward of
    its own has the advantage of its number, among the group's other rollouts that came so far: so two players in one
    rollout are trained apart (agents3, 7)."""
    fork = agent("fork", function=f"forking_agent:{function}")
    samples = sample(case, [fork], [("fork", "1+1"), ("fork", "2+2")], num_samples=6)
    assert {len(s.sequences) for s in samples} >= {1, 2, 3}
    num_tokens = sum(row.tokens["mask"].sum() for s in samples for row in s.sequences)
    by_turn = function == "scored_by_call"
    grpo = {"normalize_rewards": False, "turn_level_advantages": by_turn}
    metrics, ours = train_once(case.policy, samples, None, settings(grpo=grpo), case.ranks, step=3)
    assert metrics["global_valid_toks"] == num_tokens
    case.oracle.zero_grad()
    for s in samples:
        peers = [o for o in samples if o.prompt == s.prompt and o is not s]
        for row in s.sequences:
            ids = torch.tensor(row.token_ids)
            logits_TV = case.oracle(ids[None]).logits[0, len(row.prompt_ids) - 1 : -1, : case.tokenizer.vocab_size]
            logp_TV = (logits_TV / TEMPERATURE).log_softmax(-1)
            logp_T = logp_TV.gather(1, ids[len(row.prompt_ids) :, None])[:, 0]
            for call, number in zip(row.calls, row.turns, strict=True):
                reward, others = s.grade.reward, [o.grade.reward for o in peers]
                if by_turn:
                    reward = s.grade.turn_rewards[number]
                    others = [o.grade.turn_rewards[number] for o in peers if o.num_calls > number]
                advantage = reward - sum(others) / len(others) if others else 0.0
                logps = logp_T[call["start"] : call["end"]]
                (-advantage * logps.sum() / num_tokens).backward(retain_graph=True)
    for name, param in case.oracle.named_parameters():
        if name in ours:
            assert (ours[name] - param.grad).norm() <= 1e-4 * param.grad.norm(), name
    assert len(ours) > 10


def test_what_was_trained_can_be_read(case, tmp_path):
    """samples.jsonl has each call of each row, with the ids that were drawn."""
    fork = agent("fork", function="forking_agent:scored_by_call")
    samples = sample(case, [GOOD, fork, TURNS], [("good", "1+1"), ("fork", "2+2"), ("turns", "3+3")], num_samples=4)
    samples[0].is_filtered = True
    for s in samples:
        s.advantage = [float(number) for number in range(s.num_calls)]
    log = RunLog(tmp_path, LoggerConfig(num_samples_to_log=12, tensorboard_enabled=False), first_step=0, num_steps=1)
    log.samples(1, "train", samples, case.tokenizer)
    records = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(records) == 12 and max(len(record["rows"]) for record in records) > 2
    for s, record in zip(samples, records, strict=True):
        calls = [call for row in record["rows"] for call in row]
        assert sorted(call["number"] for call in calls) == list(range(s.num_calls))
        for row, said in zip(s.sequences, record["rows"], strict=True):
            ids = list(row.prompt_ids)
            messages = []
            for call in said:
                messages += call["messages"]
                assert case.tokenizer.render(messages)[: len(ids)] == ids or len(messages) > 1
                messages.append(call["reply"])
                assert call["reply"]["content"] is not None and call["advantage"] == call["number"]
                assert call["is_trained"] == (s is not samples[0])
                assert call["reward"] == s.grade.turn_rewards[call["number"]]
                assert "".join(call["tokens"]) == case.tokenizer.decode(call["ids"], special=True)
            drawn = [token for call in said for token in call["ids"]]
            assert drawn == row.tokens["id"][row.tokens["mask"]].tolist()
            logps = [logp for call in said for logp in call["sampler_logps"]]
            assert logps == pytest.approx(row.tokens["logp"][row.tokens["mask"]], abs=6e-5)


def test_a_reward_for_each_reply_or_none(case):
    wrong = agent("turns", function="bad_agents:wrong_number_of_rewards")
    [s] = sample(case, [wrong], [("turns", "1+1")], num_samples=1)
    assert (s.grade.outcome, s.grade.reward, s.grade.turn_rewards) == ("crashed", 0.0, [0.0])
    assert "2 call_rewards for 1 replies" in s.grade.message


def test_too_many_crashes_stop_the_run(case):
    bad = agent("bad", function="bad_agents:bad")
    inputs = [("bad", "raises"), ("bad", "good")]
    with pytest.raises(StopRun, match=r"1 of 2.*env.max_crashed_fraction=0.4.*no luck"):
        sample(case, [bad], inputs, num_samples=1, max_crashed_fraction=0.4)
    crashed, right = sample(case, [bad], inputs, num_samples=1, max_error_fraction=0.0)
    assert (crashed.grade.outcome, crashed.grade.is_valid, right.grade.outcome) == ("crashed", True, "ok")


def test_a_rollout_without_a_reply_is_an_error_and_not_a_crash(case):
    bad = agent("bad", function="bad_agents:bad")
    with pytest.raises(StopRun, match=r"1 of 1.*env.max_error_fraction=0.*never called"):
        sample(case, [bad], [("bad", "never")], num_samples=1, max_error_fraction=0.0)
