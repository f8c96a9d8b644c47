import pytest
from red_team import Checks


@pytest.fixture(scope="session")
def check():
    """Runs `grpo.py --check` on hostile inputs: see helpers/red_team.py."""
    with Checks() as checks:
        yield checks
