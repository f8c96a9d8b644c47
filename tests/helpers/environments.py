"""Environments that are ready to grade, as a run has them."""

from base.graders.environments import make_environment, start_environment
from config import EnvConfig
from envs import Environment


def ready(name: str, cfg: EnvConfig) -> Environment:
    """Made, started and tried, for one rank."""
    environment = make_environment(name, cfg)
    start_environment(name, environment)
    return environment
