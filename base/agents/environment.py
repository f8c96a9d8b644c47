"""Agents as environments: a job of a worker is a whole rollout, from its start to its reward (worker.py)."""

import json
import math
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

from base.graders.environments import read_results
from base.graders.pool import PoolEnvironment, pool_of
from config import AgentConfig, ConfigError, shortened
from envs import OUTCOMES, Answers, StepResult, Turn
from judges.codec import Json
from judges.pool import Graded
from records import Problem

LOOPBACK = "127.0.0.1"
WORKER = Path(__file__).resolve().with_name("worker.py")


class Agent(PoolEnvironment):
    """A program that asks the endpoint, and gives the reward of what it did. Raises ConfigError, with the key, where it
    cannot be started.

    It grades no turns: the engine draws what it asks for.
    """

    is_agent = True

    def __init__(self, cfg: AgentConfig, kwargs: dict[str, Json], num_ranks: int):
        self.cfg = cfg
        self.kwargs = kwargs
        self.num_ranks = num_ranks
        self.reward_names = cfg.reward_names
        self.max_starting = cfg.max_starting
        if cfg.max_starting is not None:
            self.max_starting = max(1, cfg.max_starting // num_ranks)
        for key, program in (("python", cfg.python), ("command", cfg.command and cfg.command[0])):
            if program and not shutil.which(program):
                raise ConfigError(f"env.agents: {cfg.name}.{key}={program}: no such program; give its path")
        if cfg.address:
            try:
                socket.create_server((cfg.address, 0)).close()
            except OSError as error:
                fix = "give an address of this machine that the agent reaches"
                raise ConfigError(f"env.agents: {cfg.name}.address={cfg.address}: {error}: {fix}") from error
        absent = [name for name in cfg.pass_env if name not in os.environ]
        if absent:
            fix = "set it where the run starts, or remove it here"
            raise ConfigError(f"env.agents: {cfg.name}.pass_env: {absent[0]} is not set: {fix}")

    def start_workers(self) -> None:
        """They import the agent's function, and wait for rollouts."""
        cfg = self.cfg
        try:
            self.pool = pool_of(
                f"{WORKER}:run",
                cfg,
                self.num_ranks,
                first={"function": cfg.function, "kwargs": self.kwargs, "isolation": cfg.isolation},
                python=shutil.which(cfg.python or "") or "",
                pass_env=cfg.pass_env,
            )
        except ConfigError as error:
            key = f"function={cfg.function}" if cfg.function else f"python={cfg.python}"
            raise ConfigError(f"env.agents: {cfg.name}.{key}: {error}") from error

    def check_answers(self, answers: Answers) -> None:
        for where, _, row in answers:
            try:
                json.dumps(row)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{where}: an agent gets its row as JSON: {error}") from error

    def rollout_job(self, problem: Problem, given: dict[str, Json]) -> dict:
        """What a worker gets. given: base_url, seed, is_validation, tools."""
        row = {"messages": problem.messages, "answer": problem.answer, "row": problem.fields}
        command = [os.path.abspath(word) if os.path.exists(word) else word for word in self.cfg.command or ()]
        program = {"function": self.cfg.function, "command": command, "kwargs": self.kwargs}
        job = row | program | given | {"deadline_s": self.cfg.deadline_s, "isolation": self.cfg.isolation}
        if self.cfg.address:
            job["base_url"] = job["base_url"].replace(LOOPBACK, self.cfg.address)
        return job

    def result(self, turn: Turn | None, graded: Graded) -> StepResult:
        """Of a rollout, which has no turn. state: call_rewards; or what went wrong, and whether the agent crashed,
        which the policy may have caused."""
        if graded.outcome == "timeout":
            return StepResult(0.0, "timeout", state={"message": graded.message})
        if graded.outcome == "error":
            return StepResult(0.0, "error", state={"message": graded.message, "crashed": True})
        if graded.value is None:
            return StepResult(0.0, "error", state={"message": "the agent returned None"})
        given = graded.value if isinstance(graded.value, dict) else {"reward": graded.value}
        try:
            [result] = read_results(self.cfg.name, [_result(**given)], [turn])
            call_rewards = result.state["call_rewards"]
            are_finite = all(map(math.isfinite, call_rewards))
        except (ConfigError, TypeError, OverflowError):
            form = "a number, null or {reward, outcome, rewards, extracted, call_rewards}"
            form = f"{form}; outcomes: {', '.join(OUTCOMES)}"
            message = f"the agent returned {shortened(graded.value)}, expected {form}"
            return StepResult(0.0, "error", state={"message": message, "crashed": True})
        if not are_finite or (result.outcome == "error" and given.get("outcome") != "error"):
            no_parts = dict.fromkeys(result.rewards, 0.0)
            return StepResult(0.0, "error", rewards=no_parts, state={"message": "a reward is not finite"})
        return replace(result, state={"call_rewards": [float(reward) for reward in call_rewards]})


def _result(
    reward: float,
    outcome: str | None = None,
    rewards: dict[str, float] | None = None,
    extracted: Json = None,
    call_rewards: list[float] | None = None,
) -> StepResult:
    """Without an outcome a reward above 0 is `ok`."""
    if outcome is None:
        outcome = "ok" if reward > 0 else "wrong"
    text = None if extracted is None else str(extracted)
    state = {"call_rewards": call_rewards or []}
    return StepResult(reward, outcome, rewards=rewards or {}, extracted=text, state=state)
