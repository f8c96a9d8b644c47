"""Grades turns while other replies are drawn: they go in as replies end, and results come out in any order.

Turns of a `PoolEnvironment` go to its workers one by one. The environments in INSTANT, and those with `main_thread`,
are called at once. Any other environment has a thread, which calls it with all turns that wait: a slow one holds up no
decode step, and still gets batches. A thread ends with the process, since workers that it starts end with it.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from queue import Empty, Queue, SimpleQueue
from typing import TYPE_CHECKING

import torch

from base.graders.environments import INSTANT, read_results
from base.system.disk import say
from base.system.exits import Interrupted, StopRun
from base.system.users_code import describe
from config import ConfigError
from envs import Environment, StepResult, Turn
from records import Problem

if TYPE_CHECKING:
    from judges.pool import Graded

WAIT_SECONDS = 0.01  # for one source of results, before the next one is looked at
Turns = dict[str, Turn]  # by a name that the caller gave the turn
Results = dict[str, StepResult]


class Grading:
    """Turns between a reply's end and its result. Use it from one thread.

    stop: whether to give up waiting, asked while it waits. raised: what environments raised, for the caller to read
    and clear. whole_groups, special_tokens: the environments that have these attributes. jobs: those whose turns go to
    workers; a class with a step() of its own is not one. agents: their rollouts are graded as
    wholes.
    """

    def __init__(self, environments: Mapping[str, Environment], stop: Callable[[], bool] = lambda: False):
        self.environments = environments
        self.stop = stop
        self.raised: list[str] = []
        # Environment -> number of a job in its pool -> (name, turn); an agent's rollout has no turn
        self.jobs: dict[str, dict[int, tuple[str, Turn | None]]] = {}
        self.whole_groups: set[str] = set()
        self.special_tokens: set[str] = set()
        self.agents: set[str] = set()
        others = {name: made for name, made in environments.items() if name not in INSTANT}
        for name, environment in others.items():
            from base.graders.pool import PoolEnvironment  # a run whose grades take no time does without

            if getattr(type(environment), "step", None) is PoolEnvironment.step:
                self.jobs[name] = {}
            elif getattr(environment, "whole_groups", False):
                self.whole_groups.add(name)
            if getattr(environment, "special_tokens", False):
                self.special_tokens.add(name)
            if getattr(environment, "is_agent", False):
                self.agents.add(name)
        self.threads: dict[str, SimpleQueue[tuple[Turns, ...]]] = {}  # environment -> what its thread is asked
        # For `grade` to return, or raise. Not a SimpleQueue: CPython 3.11's get(timeout) waits without end if a signal
        # comes as the time runs out.
        self.ended: Queue[Results | BaseException] = Queue()

    def grade(self, asked: Mapping[str, Sequence[Turns]], block: bool = False) -> Results:
        """Takes turns for each environment, in parts that go together. Returns the results that are there, each once;
        with `block` at least one. Raises Interrupted when `stop` says so, StopRun when no worker can start any more,
        and what an environment may raise: ConfigError, Interrupted, StopRun."""
        for env_name, parts in asked.items():
            self.begin(env_name, *parts)
        results: Results = {}
        while True:
            busy = [env_name for env_name, jobs in self.jobs.items() if jobs]
            if busy and self.stop():
                raise Interrupted
            for env_name in busy:
                seconds = WAIT_SECONDS if block and self.ended.empty() else 0.0
                for number, graded in self._poll(env_name, seconds).items():
                    self._read(env_name, *self.jobs[env_name].pop(number), graded)
            with suppress(Empty):
                while True:
                    done = self.ended.get(timeout=WAIT_SECONDS if block and not results and not busy else 0.0)
                    if isinstance(done, BaseException):
                        raise done
                    results |= done
            if results or not block:
                return results
            if self.stop():
                raise Interrupted

    def begin(self, env_name: str, *parts: Turns) -> None:
        """Has the turns of an environment graded."""
        environment = self.environments[env_name]
        if env_name in self.jobs:
            for name, turn in chain.from_iterable(part.items() for part in parts):
                with self._failures(env_name, [name]):
                    job = environment.job(turn)
                    if job is None:
                        self._read(env_name, name, turn, None)
                    else:
                        self.jobs[env_name][environment.submit(job)] = name, turn
        elif env_name in INSTANT or getattr(environment, "main_thread", False):
            self._grade(env_name, environment.step, *parts)
        else:
            if env_name not in self.threads:
                self.threads[env_name] = SimpleQueue()
                device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
                threading.Thread(target=self._work, args=(env_name, device), name=env_name, daemon=True).start()
            self.threads[env_name].put(parts)

    def begin_rollout(self, name: str, problem: Problem, given: dict[str, object]) -> None:
        """Starts the problem's agent. Its result has this name, as that of a turn. given: of `Agent.rollout_job`."""
        env_name = problem.env_name
        agent = self.environments[env_name]
        with self._failures(env_name, [name]):
            number = agent.submit(agent.rollout_job(problem, given))
            self.jobs[env_name][number] = name, None

    def _poll(self, env_name: str, seconds: float) -> "dict[int, Graded]":
        """The jobs that have ended, by number."""
        try:
            return self.environments[env_name].poll(seconds)
        except StopRun as stop:
            raise StopRun(f"env_name '{env_name}': {stop}") from stop

    def _read(self, env_name: str, name: str, turn: Turn | None, graded: "Graded | None") -> None:
        self._grade(env_name, lambda turns: [self.environments[env_name].result(turns[0], graded)], {name: turn})

    def _grade(self, env_name: str, step: Callable[[list[Turn]], Sequence[StepResult]], *parts: Turns) -> None:
        """By one call of `step`; where it raises, by a call for each part. Time decides which parts wait together, and
        a reply on which the environment fails must cost no other reply its grade."""
        turns = {name: turn for part in parts for name, turn in part.items()}
        with suppress(BaseException) if len(parts) > 1 else self._failures(env_name, turns):
            results = read_results(env_name, step([*turns.values()]), turns)
            self.ended.put(dict(zip(turns, results, strict=True)))
            return
        if len(parts) > 1:
            for part in parts:
                self._grade(env_name, step, part)

    @contextmanager
    def _failures(self, env_name: str, names: Collection[str]) -> Iterator[None]:
        """What the environment raises is said, here and in `raised`, and the turns of these names have outcome
        `error`; or it ends the run."""
        try:
            yield
        except StopRun as stop:
            self.ended.put(StopRun(f"env_name '{env_name}': {stop}"))
        except BaseException as error:
            if isinstance(error, ConfigError | Interrupted) or not isinstance(error, Exception | SystemExit):
                self.ended.put(error)
                return
            raised = describe(error)
            hint = "; with main_thread=True, step() may use signals" if "main thread" in raised else ""
            problem = f"env_name '{env_name}' raised {raised}{hint}"
            if problem not in self.raised:
                self.raised.append(problem)
                say(f"WARNING: {problem}: the replies of that call are not graded", is_error=True)
            self.ended.put(dict.fromkeys(names, StepResult(0.0, "error")))

    def _work(self, env_name: str, device: int | None) -> None:
        """The thread of an environment."""
        if device is not None:
            torch.cuda.set_device(device)  # of this thread
        asked = self.threads[env_name]
        step = self.environments[env_name].step
        while True:
            parts = asked.get()
            with suppress(Empty):
                while True:
                    parts += asked.get_nowait()
            self._grade(env_name, step, *parts)
