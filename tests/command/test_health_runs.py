"""Real runs of what tests/run/health keeps: sick ones fire their rule first, healthy ones none, and both as kept."""

import health_runs
import pytest
from health_runs import HEALTHY, SICK, fired, kept

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_fires_its_rule_first(name, tmp_path):
    first, arguments = SICK[name]
    code, steps = health_runs.run(arguments, tmp_path)
    assert code == 0 and next(iter(fired(steps))) == first
    assert fired(steps).keys() == fired(kept(name)).keys()


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_fires_nothing(name, tmp_path):
    code, steps = health_runs.run(HEALTHY[name], tmp_path)
    assert code == (3 if name == "dapo" else 0)
    assert len(steps) >= len(kept(name)) - 20 and fired(steps).keys() <= {"solved"}
    assert not any(value for step in steps for metric, value in step.items() if metric.startswith("health/"))
