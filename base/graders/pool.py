"""The base of environments that grade in worker processes. The judges' pool is imported where one is made."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from base.system.exits import StopRun
from config import ConfigError
from envs import Environment, StepResult, Turn

if TYPE_CHECKING:
    from judges.codec import Json
    from judges.pool import Graded, GraderPool


class PoolConfig(Protocol):
    """A section of `env` that has workers."""

    num_workers: int
    deadline_s: float
    memory_mib: int | None


def pool_of(
    target: str,
    cfg: PoolConfig,
    num_ranks: int,
    *,
    first: "Json" = None,
    python: str = "",
    pass_env: Sequence[str] = (),
) -> "GraderPool":
    """A pool with this rank's share of the workers of a section of `env`. ConfigError if no worker can start."""
    from judges.pool import GraderPool, WorkerError

    try:
        return GraderPool(
            target,
            num_workers=max(1, cfg.num_workers // num_ranks),
            deadline_s=cfg.deadline_s,
            memory_mib=cfg.memory_mib,
            first=first,
            python=python,
            pass_env=pass_env,
        )
    except WorkerError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def _workers_or_stop() -> Iterator[None]:
    """In this block, StopRun takes the place of the pool's error."""
    from judges.pool import WorkerError  # there is a pool, so there are judges

    try:
        yield
    except WorkerError as error:
        raise StopRun(str(error)) from error


class PoolEnvironment(Environment):
    """A base for environments that grade in worker processes, by `pool`: each turn alone, as soon as it is there."""

    def submit(self, job: "Json") -> int:
        """Gives a worker the job. Returns the job's number; raises StopRun if no worker can start any more."""
        with _workers_or_stop():
            return self.pool.submit(job)

    def poll(self, seconds: float) -> "dict[int, Graded]":
        """The jobs that have ended, by number, after at most so many seconds. Raises StopRun as `submit` does."""
        with _workers_or_stop():
            return self.pool.poll(seconds)

    def job(self, turn: Turn) -> "Json":
        """What a worker gets for the turn, as JSON; None if it needs no worker."""
        raise NotImplementedError

    def result(self, turn: Turn, graded: "Graded | None") -> StepResult:
        """The result of the turn, by what the worker said; None if job() was None."""
        raise NotImplementedError

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        jobs = [self.job(turn) for turn in turns]
        graded = iter(())
        if self.pool is not None:
            graded = iter(self.pool.grade([job for job in jobs if job is not None]))
        results = []
        for turn, job in zip(turns, jobs, strict=True):
            if job is None:
                results.append(self.result(turn, None))
            else:
                results.append(self.result(turn, next(graded)))
        return results
