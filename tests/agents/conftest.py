"""An engine over a tiny model, shared by all tests of agents."""

import pytest


@pytest.fixture(scope="session")
def served(tmp_path_factory, one_rank):
    """Engine, policy, tokenizer and ranks: agent_case.start."""
    from agent_case import start

    return start(tmp_path_factory.mktemp("agents"), *one_rank)
