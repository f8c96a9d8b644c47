"""The numbers of a step of which agents are the reason."""

from collections.abc import Sequence

import numpy as np

from records import Sample


def agent_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over the rollouts that agents led: replies, sequences, and the share that crashed."""
    led = [sample for sample in samples if sample.is_led]
    if not led:
        return {}
    num_rows = [len(sample.sequences) if sample.num_calls else 0 for sample in led]
    has_crashed = [sample.grade.outcome == "crashed" for sample in led]
    return {
        "agent/calls_per_rollout": float(np.mean([sample.num_calls for sample in led])),
        "agent/rows_per_rollout": float(np.mean(num_rows)),
        "agent/crashed": float(np.mean(has_crashed)),
    }
