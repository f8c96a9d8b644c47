"""The numbers of a step of which agents are the reason."""

from collections.abc import Sequence

import numpy as np

from records import Sample


def agent_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over the rollouts of agents: replies, sequences, and the share that crashed."""
    rollouts = [sample for sample in samples if sample.by_agent]
    if not rollouts:
        return {}
    num_rows = [len(sample.sequences) if sample.num_calls else 0 for sample in rollouts]
    has_crashed = [sample.grade.outcome == "crashed" for sample in rollouts]
    return {
        "agent/calls_per_rollout": float(np.mean([sample.num_calls for sample in rollouts])),
        "agent/rows_per_rollout": float(np.mean(num_rows)),
        "agent/crashed": float(np.mean(has_crashed)),
    }
