"""The helpers on which other tests rely see what they should: ranks.py, a rank that raises, dies or hangs."""

import os
import signal
import time

import pytest
from ranks import ends_of, ranks

from base.system.ranks import gather, start_process_group

pytestmark = pytest.mark.slow


@ranks(2, seconds=30)
def sum_of_ranks(factor, fails=False):
    place, _ = start_process_group(tp_size=1)
    if fails and place.rank == 1:
        raise ValueError("rank 1 has had enough")
    return factor * sum(gather(place.rank + 1))


@ranks(3)
def test_a_test_itself_runs_on_all_ranks(tmp_path):
    start_process_group(tp_size=1)
    assert gather(str(tmp_path)) == 3 * [str(tmp_path)]


def test_results_by_rank_and_an_error_with_its_reason():
    assert sum_of_ranks(2) == [6, 6]
    with pytest.raises(AssertionError, match="rank 1 has had enough"):
        sum_of_ranks(2, fails=True)


def end_badly(name):
    print("about to", name, flush=True)
    if os.environ["RANK"] == "0":
        os._exit(7)
    if name == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.parametrize("name", ["die", "hang"])
def test_ranks_that_end_badly(name):
    zero, one = ends_of(end_badly, 2, name, seconds=4)
    assert (zero.code, one.code) == (7, -9) and f"about to {name}" in one.output
    assert ("Timeout" in one.output) == (name == "hang")
