"""The environments that ask judges/: what they give for a reply, and which rows they refuse."""

import json

import pytest
from environments import ready
from isolations import ISOLATIONS
from processes import children

from config import CodeEnvConfig, ConfigError, EnvConfig, MathEnvConfig
from envs import OUTCOMES, Turn
from judges import sandbox

needs_sandbox = pytest.mark.skipif(not ISOLATIONS, reason="this machine has no seccomp")
ADD = {"entry_point": "add", "test": "def check(f):\n    assert f(1, 2) == 3\n    assert f(5, -7) == -2\n"}
RIGHT = "def add(a, b):\n    return a + b\n"
PROGRAM = {"tests": [{"input": "2\n3\n", "output": "5\n"}]}


@pytest.fixture(scope="module")
def math():
    environment = ready("math", EnvConfig(math=MathEnvConfig(num_workers=1)))
    yield environment
    environment.close()


@pytest.mark.parametrize(
    ("reply", "finish_reason", "reward", "outcome"),
    [
        (r"\boxed{5.0}", "stop", 1.0, "ok"),
        ("#### 5", "stop", 1.0, "ok"),
        (r"\boxed{4}", "stop", 0.0, "wrong"),
        ("#### 4", "stop", 0.0, "wrong"),
        ("five", "stop", 0.0, "parse_fail"),
        (r"\boxed{}", "stop", 0.0, "parse_fail"),
        (r"\boxed{5}", "length", 0.0, "parse_fail"),
    ],
)
def test_rewards(math, reply, finish_reason, reward, outcome):
    messages = [{"role": "user", "content": r"\boxed{5}"}, {"role": "assistant", "content": reply}]
    (result,) = math.step([Turn(messages, "5", finish_reason)])
    assert (result.reward, result.outcome, result.done) == (reward, outcome, True)
    assert result.extracted == {"ok": "5", "wrong": "4"}.get(outcome)


def test_answers_that_cannot_be_graded_are_found_before_training(math):
    math.check_answers([("r:1", "5", {}), ("r:2", r"\frac{1}{2}", {}), ("r:3", "so 5\n#### 5", {})])
    for answer in ("", " ", "because ####", r"\boxed{}", "9" * 3000):
        with pytest.raises(ConfigError, match=r"^r:7: answer .* is not a final answer, .*'math'"):
            math.check_answers([("r:1", "5", {}), ("r:7", answer, {})])


def test_strict_environment():
    cfg = EnvConfig(math=MathEnvConfig(num_workers=1, math_verify_impl="dapo_math_verify"))
    environment = ready("math", cfg)
    turns = [Turn([{"role": "assistant", "content": text}], "5", "stop") for text in ("Answer: 5", r"\boxed{5}")]
    assert [result.outcome for result in environment.step(turns)] == ["ok", "parse_fail"]
    environment.close()


def code_environment(**changes):
    kept = {name: value for name, value in (("isolation", ISOLATIONS[0]), ("num_workers", 1), *changes.items())}
    return ready("code", EnvConfig(code=CodeEnvConfig(**kept)))


@needs_sandbox
def test_environment_gives_results():
    before = children()
    code = code_environment()
    try:
        code.check_answers([("a:1", "", ADD), ("a:2", json.dumps(PROGRAM), {})])
        with pytest.raises(ConfigError, match=r"a:3: .*no tests, or two kinds of them"):
            code.check_answers([("a:3", "7", {})])
        turns = [
            Turn([{"role": "assistant", "content": reply}], "", reason, fields=ADD)
            for reply, reason in ((RIGHT, "stop"), ("def add(a, b): return 0", "stop"), (RIGHT, "length"), ("", "stop"))
        ]
        results = code.step(turns)
        assert [result.outcome for result in results] == ["ok", "wrong", "parse_fail", "parse_fail"]
        assert [result.reward for result in results] == [1.0, 0.0, 0.0, 0.0]
    finally:
        code.close()
    assert children() == before


def test_without_isolation_it_does_not_start(monkeypatch):
    before = children()

    def refuse(*_):
        raise sandbox.Unavailable("unshare: Operation not permitted")

    monkeypatch.setattr(sandbox, "run", refuse)
    with pytest.raises(ConfigError, match=r"env\.code\.isolation=required.*unshare: Operation not permitted.*=none"):
        code_environment(isolation="required")
    assert children() == before


@needs_sandbox
def test_a_stop_string_that_is_a_fence_leaves_right_programs_right():
    """policy.generation.stop_strings: ["```"] stays in the reply, whose opening fence the prompt may hold."""
    code = code_environment()
    prompts = ("def add(a, b):\n", 'def add(a, b):\n    """The sum."""\n', "", "")
    replies = ("    return a + b\n```", "    return a + b\n```", f"{RIGHT}```", f"python\n{RIGHT}```")
    turns = []
    for prompt, right in zip(prompts, replies, strict=True):
        for reply in (right, right.replace("+", "-")):
            turns.append(Turn([{"role": "assistant", "content": reply}], "", "stop", fields=ADD | {"prompt": prompt}))
    rewards = [result.reward for result in code.step(turns)]
    code.close()
    assert rewards == [1.0, 0.0] * 4


@needs_sandbox
def test_a_test_that_forges_a_verdict_gives_only_outcomes():
    """What reaches rollout.py, whose assertion ends the run."""
    code = code_environment()
    results = []
    for line in (b"great\n", b"wrong\n", b"\xff\n"):
        writes = f"for fd in range(1, 64):\n    try: os.write(fd, {line!r})\n    except OSError: pass\n"
        fields = ADD | {"test": f"import os\nadd(1, 2)\n{writes}os._exit(0)"}
        turn = Turn([{"role": "assistant", "content": RIGHT}], "", "stop", fields=fields)
        results += code.step([turn])
    code.close()
    assert [result.outcome for result in results] == ["error", "wrong", "error"]
    assert all(result.outcome in OUTCOMES and result.reward == 0 for result in results)
