"""Grades turns while other replies are drawn: they go in as replies end, and results come out in any order.

Turns of a `PoolEnvironment` go to its workers one by one. The environments in INSTANT, and those with `main_thread`,
are called at once. Any other environment has a thread, which calls it with all turns that wait: a slow one holds up no
decode step, and still gets batches. A thread ends with the process, since workers that it starts end with it.
"""

import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

import torch

from config import ConfigError
from envs import Environment, Exact, RewardModelEnv, StepResult, Turn
from graders.environments import MathMultiReward, PoolEnvironment, read_results
from graders.pool import Graded, GraderPool
from system.exits import Interrupted, StopRun
from system.imports import describe

INSTANT = (Exact, MathMultiReward, RewardModelEnv)  # take no time; a class derived from one of them may
WAIT_SECONDS = 0.01  # for one source of results, before the next one is looked at
Turns = dict[str, Turn]  # by a name that the caller gave the turn
Results = dict[str, StepResult]


class Grading:
    """Turns between a reply's end and its result. Use it from one thread.

    raised: what environments raised, for the caller to read and clear. whole_groups, special_tokens: the environments
    that have these attributes. pooled: those whose turns go to workers; a class with a step() of its own is not.
    leading: agents, whose turns are whole rollouts.
    """

    def __init__(self, environments: Mapping[str, Environment]):
        self.environments = environments
        self.raised: list[str] = []
        pooled = ((name, getattr(type(each), "step", None)) for name, each in environments.items())
        self.pooled = {name for name, step in pooled if step is PoolEnvironment.step}
        self.special_tokens = {name for name, each in environments.items() if getattr(each, "special_tokens", False)}
        whole = {name for name, each in environments.items() if getattr(each, "whole_groups", False)}
        self.whole_groups = whole - self.pooled
        self.leading = {name for name, each in environments.items() if getattr(each, "leads", False)}
        self.jobs: dict[str, dict[int, tuple[str, Turn]]] = {}  # environment -> number of a job in its pool -> turn
        self.threads: dict[str, SimpleQueue[Turns]] = {}  # environment -> what its thread is asked
        self.from_threads: SimpleQueue[Results | BaseException] = SimpleQueue()
        self.num_in_threads = 0

    def grade(self, turns: Mapping[str, Turns], block: bool = False) -> Results:
        """Takes the turns of each environment. Returns the results that are there, each once; with `block` at least
        one. Raises Interrupted when GraderPool.stop says so, and what an environment may raise: ConfigError,
        Interrupted, StopRun."""
        results: Results = {}
        for env_name, each in turns.items():
            results |= self._begin(env_name, each)
        while True:
            seconds = WAIT_SECONDS if block and not results else 0.0
            for env_name, jobs in self.jobs.items():
                for number, graded in (self.environments[env_name].pool.poll(seconds) if jobs else {}).items():
                    results |= self._read(env_name, *jobs.pop(number), graded)
            with suppress(Empty):
                while self.num_in_threads:
                    done = self.from_threads.get(timeout=0.0 if results else seconds)
                    if isinstance(done, BaseException):
                        raise done
                    self.num_in_threads -= len(done)
                    results |= done
            if results or not block:
                return results
            if GraderPool.stop():
                raise Interrupted

    def _begin(self, env_name: str, turns: Turns) -> Results:
        """Has the turns graded; returns the results that are there at once."""
        environment = self.environments[env_name]
        if env_name in self.pooled:
            results: Results = {}
            for key, turn in turns.items():
                results |= self._begin_job(env_name, key, turn)
            return results
        if type(environment) in INSTANT or getattr(environment, "main_thread", False):
            return self._grade(env_name, environment.step, turns)
        if env_name not in self.threads:
            self.threads[env_name] = SimpleQueue()
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            threading.Thread(target=self._work, args=(env_name, device), name=env_name, daemon=True).start()
        self.threads[env_name].put(turns)
        self.num_in_threads += len(turns)
        return {}

    def _begin_job(self, env_name: str, key: str, turn: Turn) -> Results:
        environment = self.environments[env_name]
        try:
            job = environment.job(turn)
        except (Exception, SystemExit) as error:
            return self._failed(env_name, error, [key])
        if job is None:
            return self._read(env_name, key, turn, None)
        self.jobs.setdefault(env_name, {})[environment.pool.submit(job)] = key, turn
        return {}

    def _read(self, env_name: str, key: str, turn: Turn, graded: Graded | None) -> Results:
        environment = self.environments[env_name]
        return self._grade(env_name, lambda turns: [environment.result(turns[0], graded)], {key: turn})

    def _grade(self, env_name: str, step: Callable[[list[Turn]], Sequence[StepResult]], turns: Turns) -> Results:
        """By one call of `step`; if it raises, the turns have outcome `error`."""
        try:
            return dict(zip(turns, read_results(env_name, step([*turns.values()]), turns), strict=True))
        except (Exception, SystemExit) as error:
            return self._failed(env_name, error, turns)

    def _failed(self, env_name: str, error: BaseException, keys: Collection[str]) -> Results:
        """Says what the environment raised, here and in `raised`, unless it ends the run."""
        if isinstance(error, ConfigError | Interrupted | StopRun):
            raise error
        hint = "; with main_thread=True it may use signals" if "main thread" in str(error) else ""
        problem = f"env_name '{env_name}': step() raised {describe(error)}{hint}"
        self.raised += [problem] * (problem not in self.raised)
        print(f"WARNING: {problem}: {len(keys)} replies have no grade", file=sys.stderr, flush=True)
        return dict.fromkeys(keys, StepResult(0.0, "error"))

    def _work(self, env_name: str, device: int | None) -> None:
        """The thread of an environment."""
        if device is not None:
            torch.cuda.set_device(device)  # of this thread
        asked, step = self.threads[env_name], self.environments[env_name].step
        while True:
            turns = asked.get()
            with suppress(Empty):
                while True:
                    turns = turns | asked.get_nowait()
            try:
                self.from_threads.put(self._grade(env_name, step, turns))
            except BaseException as error:  # for `grade` to raise
                self.from_threads.put(error)
