"""env_name of a dataset -> its environment: `make_environment`, `start_environment`; and what its results must be.

Workers import neither this file nor envs.py. What a run does not use is not imported.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, SupportsFloat

from base.system.users_code import call, needed_by
from config import ConfigError, EnvConfig, shortened
from envs import OUTCOMES, Environment, Exact, RewardModelEnv, StepResult, Turn

if TYPE_CHECKING:
    from judges.codec import Json

INSTANT = ("exact", "math_multi_reward", "reward_model")  # need no process and take no time
JUDGED = ("math", "code")


def make_environment(name: str, cfg: EnvConfig, num_ranks: int = 1) -> Environment:
    """`env_name` of a dataset -> its environment, without workers. `num_ranks` share the machine.

    "module:name" is a user's class, made with the keyword arguments in env.custom[name], or a reward function. Raises
    ConfigError.
    """
    if ":" in name:
        from base.system.imports import import_attribute  # a run without dotted paths does without, here and elsewhere

        environment = _custom(name, import_attribute(name, "env_name"), cfg.custom.get(name, {}))
    elif name == "exact":
        environment = Exact()
    elif name == "math_multi_reward":
        from base.graders.multi_reward import MathMultiReward

        environment = MathMultiReward()
    elif name == "reward_model":
        environment = RewardModelEnv()
    elif name in JUDGED:
        environment = _judged(name, cfg, num_ranks)
    else:
        known = ", ".join([*INSTANT, *JUDGED])
        raise ConfigError(f"env_name '{name}' is unknown; known: {known}, agents, module:Class, module:function")
    return environment


def start_environment(name: str, environment: Environment) -> None:
    """Starts its workers, and has it grade its self-tests. Processes start, so call it before the engine starts."""
    if isinstance(environment, Environment):
        call(f"env_name '{name}': start_workers()", environment.start_workers)
    call(f"env_name '{name}', in its self_tests,", _self_test, name, environment)


def _judged(name: str, cfg: EnvConfig, num_ranks: int) -> Environment:
    with needed_by(f"env_name '{name}'"):
        from base.graders.judged import Code, Math
    if name == "math":
        return Math(cfg.math, num_ranks)
    return Code(cfg.code, num_ranks)


def read_results(name: str, results: object, turns: Sequence[Turn]) -> list[StepResult]:
    """The results that an environment gave for the turns, with floats. A reward that is not finite counts as outcome
    `error` with reward 0. ConfigError names the environment and what has another form than envs.py says."""
    gave = f"env_name '{name}': step() returned"
    if not isinstance(results, Iterable):
        raise ConfigError(f"{gave} {shortened(results)} results for {len(turns)} turns")
    results = list(results)
    if len(results) != len(turns):
        raise ConfigError(f"{gave} {len(results)} results for {len(turns)} turns")
    return [_read(gave, result) for result in results]


def _read(gave: str, result: StepResult) -> StepResult:
    if not isinstance(result, StepResult):
        raise ConfigError(f"{gave} {shortened(result)}, expected a StepResult")
    parts = result.rewards
    if not _is_number(result.reward):
        raise _wrong(gave, "reward", result.reward, "a number")
    if not isinstance(parts, dict) or not all(map(_is_number, parts.values())):
        raise _wrong(gave, "rewards", parts, "a dict of numbers")
    if result.outcome not in OUTCOMES:
        raise _wrong(gave, "outcome", result.outcome, f"one of {', '.join(OUTCOMES)}")
    if not _is_number(result.done):
        raise _wrong(gave, "done", result.done, "True or False")
    if not result.done and not _are_messages(result.observation):
        raise _wrong(gave, "observation", result.observation, "messages {role, content} with text in both")
    numbers = [result.reward, *parts.values()]
    if not all(abs(number) <= sys.float_info.max for number in numbers):
        return replace(result, reward=0.0, rewards=dict.fromkeys(parts, 0.0), outcome="error", done=True)
    rewards = {name: float(part) for name, part in parts.items()}
    return replace(result, reward=float(result.reward), rewards=rewards)


def _wrong(gave: str, field: str, value: object, form: str) -> ConfigError:
    return ConfigError(f"{gave} {field}={shortened(value)}, expected {form}")


def _is_number(value: object) -> bool:
    return isinstance(value, SupportsFloat) and not getattr(value, "shape", ())


def _are_messages(values: object) -> bool:
    return isinstance(values, list | tuple) and all(map(_is_message, values))


def _is_message(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return all(isinstance(value.get(key), str) for key in ("role", "content"))


def _self_test(name: str, environment: Environment) -> None:
    for reply, answer, expected, *row in getattr(environment, "self_tests", ()):
        fields = {}
        if row:
            (fields,) = row
        chat = [{"role": "user", "content": ""}, {"role": "assistant", "content": reply}]
        turn = Turn(chat, answer, "stop", fields=fields)
        (result,) = read_results(name, environment.step([turn]), [turn])
        if result.outcome != expected:  # a run would learn from noise
            environment.close()
            outcomes = f"must get '{expected}', but gets '{result.outcome}'"
            raise ConfigError(f"env_name '{name}' is broken: reply {reply!r} with answer {answer!r} {outcomes}")


def _custom(name: str, attribute: Callable, kwargs: "Mapping[str, Json]") -> Environment:
    if not isinstance(attribute, type):
        if kwargs:
            raise ConfigError(f"env_name '{name}' is a function and takes no env.custom arguments: make it a class")
        with needed_by(f"env_name '{name}'"):
            from base.graders.reward_function import RewardFunction
        return call(f"env_name '{name}'", RewardFunction, attribute, name)
    environment = call(f"env.custom['{name}']: its class", attribute, **kwargs)
    for method in ("step", "check_answers", "close"):
        if not callable(getattr(environment, method, None)):
            raise ConfigError(f"env_name '{name}': no method {method}(); derive the class from envs.Environment")
    return environment
