"""Where the options of the library come from in SGLang, which has no flag for a plugin's own.

Decides the two places: ``--json-model-override-args '{"megaflux": {...}}'``, or the environment variable
``MEGAFLUX_OPTIONS`` with the same object alone, for servers that others start. The names are those of
``megaflux_serve.config.MegaFluxConfig``, as in vLLM.
"""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from typing import Any

from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import ConfigError, renamed

FLAG, KEY = "--json-model-override-args", "megaflux"
VARIABLE = "MEGAFLUX_OPTIONS"


def is_given(server_args: Any) -> bool:
    """Whether either place holds options."""
    return VARIABLE in os.environ or KEY in _overrides(server_args)


def given_options(server_args: Any) -> dict[str, Any]:
    """The options as the user wrote them, not validated.

    Raises:
        ConfigError: options in both places, or text that is no JSON.
    """
    text, overrides = os.environ.get(VARIABLE), _overrides(server_args)
    if text is None:
        options: dict[str, Any] = overrides.get(KEY, {})
        return options
    if KEY in overrides:
        raise ConfigError(f"{FLAG} {KEY}", overrides[KEY], f"one place for options, and {VARIABLE} is set as well")
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(VARIABLE, text, f"a JSON object ({error})") from None
    return options


def megaflux_config(server_args: Any) -> MegaFluxConfig:
    """The validated options of a server; none given is all defaults.

    Raises:
        ConfigError: naming the option as the user wrote it.
    """
    options = given_options(server_args)
    with named_as_written():
        return MegaFluxConfig.parse(options)


def named_as_written() -> AbstractContextManager[None]:
    """Have a ``ConfigError`` of the core name its option as it stands where the user wrote it."""
    return renamed(_as_written)


def _as_written(field: str) -> str:
    if field.startswith("--"):
        return field
    place = VARIABLE if VARIABLE in os.environ else f"{FLAG} {KEY}"
    separator = " " if place == VARIABLE else "."
    return place if field == KEY else f"{place}{separator}{field}"  # KEY: the object itself is at fault


def _overrides(server_args: Any) -> dict[str, Any]:
    """What SGLang merges into the model's configuration; it refuses other text than a JSON object by itself."""
    try:
        overrides = json.loads(server_args.json_model_override_args)
    except json.JSONDecodeError:
        return {}
    return overrides if isinstance(overrides, dict) else {}


__all__ = ["given_options", "is_given", "megaflux_config", "named_as_written"]
