"""Finds what a config names by dotted path: an environment, a reward function, a dataset, a sampler. No torch."""

import importlib
import os
import sys
from typing import Any

from config import ConfigError


def import_attribute(path: str, key: str) -> Any:
    """The attribute that `path`, "module:name", names. Modules may lie in the working directory. Raises ConfigError,
    which names the config key `key`, where the module or its attribute cannot be imported."""
    module, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that no file there takes the place of ours
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, ValueError, AttributeError) as error:  # ValueError: an empty module name
        raise ConfigError(f"{key} '{path}': cannot be imported ({error})") from error
