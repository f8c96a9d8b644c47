"""When a run stops because of its graders and agents: too much of a step was not graded, or agents only crash."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from base.system.exits import StopRun
from base.system.ranks import gather
from records import Sample


class Failures:
    """max_error_fraction, max_crashed_fraction: the shares of a step's samples that may end in these outcomes. warn:
    tells the user."""

    def __init__(
        self, max_error_fraction: float, max_crashed_fraction: float, warn: Callable[[str], None] = lambda text: None
    ):
        self.max_error_fraction = max_error_fraction
        self.max_crashed_fraction = max_crashed_fraction
        self.warn = warn
        self.crashed_agents: set[str] = set()  # all whose rollouts crashed in their last training step

    def check(self, samples: Sequence[Sample], raised: Sequence[str], is_training: bool) -> None:
        """Tells of agents that failed. Raises StopRun where too many samples failed, on all ranks: they have the same
        samples. raised: by environments of this rank."""
        failed = [sample for sample in samples if sample.grade.message]
        if failed:
            self.warn(f"WARNING: {len(failed)} agent rollouts failed; the first: {reason_of(failed[0])}")
        self._check_errors(samples, raised)
        crashed = [sample for sample in samples if sample.grade.outcome == "crashed"]
        if len(crashed) > self.max_crashed_fraction * len(samples):
            bound = f"env.max_crashed_fraction={self.max_crashed_fraction:g}"
            said = f"{len(crashed)} of {len(samples)} rollouts crashed, more than {bound}"
            raise StopRun(f"{said}: {reason_of(crashed[0])}")
        if is_training:
            self._check_agents(samples)

    def _check_errors(self, samples: Sequence[Sample], raised: Sequence[str]) -> None:
        failed = [sample for sample in samples if sample.grade.outcome == "error"]
        if len(failed) <= self.max_error_fraction * len(samples):
            return
        reasons = [text for text in gather("; ".join(raised)) if text]
        reasons += [reason_of(sample) for sample in failed if sample.grade.message]
        reasons.append("see the environment's messages above")
        counts = dict(Counter(sample.env_name for sample in failed))
        raise StopRun(
            f"{len(failed)} of {len(samples)} answers could not be graded ({counts}), more than "
            f"env.max_error_fraction={self.max_error_fraction:g}: {reasons[0]}"
        )

    def _check_agents(self, samples: Sequence[Sample]) -> None:
        """A program that fails at whatever the policy writes would otherwise train nothing to the end of the run."""
        rollouts: dict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            if sample.by_agent:
                rollouts[sample.env_name].append(sample)
        for agent, of_agent in rollouts.items():
            if any(sample.grade.outcome != "crashed" for sample in of_agent):
                self.crashed_agents.discard(agent)
            elif agent in self.crashed_agents:
                said = f"all rollouts of this agent crashed in two steps running, {len(of_agent)} in this one"
                raise StopRun(f"{said}; the first: {reason_of(of_agent[0])}")
            else:
                self.crashed_agents.add(agent)


def reason_of(sample: Sample) -> str:
    return f"{sample.env_name}: {sample.grade.message}"
