"""Deprecated names of `ringformer.runs.config`, which configs written before 0.2.0 import from here."""

import warnings
from typing import Any

from ringformer.runs import config


def __getattr__(name: str) -> Any:
    value = getattr(config, name)
    new = "from ringformer import base_config" if name == "base_config" else f"from {config.__name__} import {name}"
    warnings.warn(f"ringformer.train.config has moved: {new}", DeprecationWarning, stacklevel=2)
    return value
