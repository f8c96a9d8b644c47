"""A reward function of TRL's gets what TRL gives it; what does not exist here is refused by its name."""

import re
import sys
from dataclasses import replace

import pytest
from environments import ready

from base.system.users_code import describe
from config import ConfigError, EnvConfig
from envs import Turn

STATES = []
CHAT = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "7"}]
TURN = Turn(CHAT, "7", "stop", {}, {"level": 3}, [5, 6], [7, 8, 9], 4)


def sees_all(prompts, completions, completion_ids, level, trainer_state, **columns):
    STATES.append((prompts, completions, completion_ids, level, trainer_state.global_step, sorted(columns)))
    return [float(trainer_state.global_step)]


async def waits(completions, level):
    return [level[0] / 2]


def reads_max_steps(completions, trainer_state):
    return [1 / trainer_state.max_steps]


def logs(completions, log_metric):
    return [1.0]


def may_log(completions, log_metric=None, environments=None, **kwargs):
    return [1.0 if log_metric is None else 0.0]


def make(name):
    return ready(f"{__name__}:{name}", EnvConfig())


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


def test_what_it_gets():
    STATES.clear()
    (result,) = make("sees_all").step([TURN])
    assert (result.reward, result.outcome) == (4.0, "ok")
    assert STATES == [(["?"], ["7"], [[7, 8, 9]], [3], 4, ["answer", "prompt_ids"])]
    for fields in ({"messages": CHAT, "level": 3}, {"prompt": CHAT[:1], "level": 3}):  # TRL's conversational form
        make("sees_all").step([replace(TURN, fields=fields)])
        assert STATES[-1][:2] == ([CHAT[:1]], [CHAT[1:]])
    make("sees_all").step([replace(TURN, fields={"prompt": "?", "level": 3})])
    assert STATES[-1][:2] == (["?"], ["7"])


def think_format(completions, **columns):
    """TRL's think_format_reward, before its mark became optional."""
    return [1.0 if re.match(r"^<think>.*</think>", text) else 0.0 for text in completions]


def wants_marks(completions):
    return [float(text.endswith("<|end|>")) for text in completions]


wants_marks.special_tokens = True


def test_a_completion_begins_with_what_the_template_opened():
    """TRL#6966."""
    turn = replace(TURN, messages=[CHAT[0], {"role": "assistant", "content": "so</think>7"}])
    results = make("think_format").step([turn, replace(turn, opened="<think>")])
    assert [result.reward for result in results] == [0.0, 1.0]
    chat = replace(turn, opened="<think>\n", fields={"messages": CHAT, "level": 3})
    make("sees_all").step([chat])
    assert STATES[-1][:2] == ([CHAT[:1]], [[{"role": "assistant", "content": "<think>\nso</think>7"}]])
    assert turn.messages[-1]["content"] == "so</think>7"


def test_a_function_that_asks_gets_special_tokens():
    """TRL#2897."""
    (result,) = make("wants_marks").step([replace(TURN, raw_reply="7<|end|>")])
    assert result.reward == 1.0 and make("wants_marks").special_tokens and not make("sees_all").special_tokens


def test_a_coroutine_function():
    assert make("waits").step([TURN])[0].reward == 1.5


def test_what_does_not_exist_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: no field 'log_metric', .* reward function .*:logs asks"):
        make("logs").check_answers([("rows.jsonl:1", "7", {"level": 1})])
    assert make("may_log").step([TURN])[0].reward == 1.0
    with pytest.raises(AttributeError, match="max_steps"):
        make("reads_max_steps").step([TURN])
    make("sees_all").check_answers([("rows.jsonl:1", "7", {"level": 1})])


def of_chats(completions, answer):
    return [float(completion[0]["content"] == gold) for completion, gold in zip(completions, answer, strict=True)]


async def of_chats_later(completions):
    return [float(completion.get("content") == "7") for completion in completions]


def adds_texts(completions):
    return [completion[0] + 1 for completion in completions]


def unpacks(completions):
    return [float(dict(message)["content"] == "7") for [message] in completions]


def asks_by_name(completions):
    return [{"7": 1.0}[completion[:1]] for completion in completions]


def of_texts(completions):
    return [float(completion.strip() == "7") for completion in completions]


@pytest.mark.parametrize("name", ["of_chats", "of_chats_later", "adds_texts", "unpacks", "asks_by_name"])
def test_trials4_f5_completions_that_are_texts_are_called_so(name):
    """And where the rows have messages, that they are lists."""
    other = replace(TURN, messages=[CHAT[0], CHAT[1] | {"content": "8"}])
    with pytest.raises((AttributeError, LookupError, TypeError, ValueError)) as error:
        make(name).step([other])
    assert "completions are texts here" in describe(error.value) and "test_reward_function.py:" in describe(error.value)
    chat = replace(TURN, fields={"messages": CHAT})
    try:
        assert make(name).step([chat])[0].reward == 1
    except (TypeError, AttributeError) as error:
        assert "texts" not in describe(error)
    assert make("of_texts").step([TURN])[0].outcome in ("ok", "wrong")
    with pytest.raises(AttributeError) as error:
        make("of_texts").step([chat])
    assert "completions are lists of messages here" in describe(error.value)
