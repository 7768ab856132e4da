"""The backend's name: ``--moe-a2a-backend megaflux --moe-runner-backend megaflux``.

Decides how SGLang learns the name, as one of all-to-all backends and one of runners; it goes with neither alone.

To SGLang's models the backend is one of DeepEP's kind: a rank brings the rows that it owns and gets them back finished.
A model then reduces nothing, gives every rank a whole shared expert, marks rows of padding, and the capture of routed
experts gathers the routes of the attention ranks instead of looking for its own among everybody's.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, get_type_hints

NAME = "megaflux"
FLAGS = f"--moe-a2a-backend {NAME} --moe-runner-backend {NAME}"


def accept() -> None:
    """Add the name to both flags' choices and to what SGLang makes of their values; again changes nothing."""
    from sglang.srt.layers.moe import utils

    for choices in (a2a_choices(), runner_choices()):
        if NAME not in choices:
            choices.append(NAME)
    if hasattr(utils, "register_moe_runner_backend_name"):  # from 0.5.19
        utils.register_moe_runner_backend_name(NAME)
    else:
        extend(utils.MoeRunnerBackend, NAME)
    extend(utils.MoeA2ABackend, NAME).is_deepep = lambda: True


def is_accepted() -> bool:
    """Whether the command line and SGLang's enumerations know the name."""
    from sglang.srt.layers.moe import utils

    runner = getattr(utils, "resolve_moe_runner_backend", utils.MoeRunnerBackend)
    try:
        values = runner(NAME).value, utils.MoeA2ABackend(NAME).value
    except ValueError:
        return False
    return values == (NAME, NAME) and NAME in a2a_choices() and NAME in runner_choices()


def is_active() -> bool:
    """Whether this server was started with the backend."""
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend

    return bool(get_moe_a2a_backend().value == NAME)


def runner_choices() -> list[str]:
    """The list behind ``--moe-runner-backend``."""
    from sglang.srt import server_args

    choices: list[str] = server_args.MOE_RUNNER_BACKEND_CHOICES
    return choices


def a2a_choices() -> list[str]:
    """The list behind ``--moe-a2a-backend``; from 0.5.19 it stands in the field's annotation only.

    SGLang evaluates an annotation that is text whenever it asks for it, so what it evaluates to takes the text's place.
    """
    from sglang.srt import server_args

    if hasattr(server_args, "MOE_A2A_BACKEND_CHOICES"):
        named: list[str] = server_args.MOE_A2A_BACKEND_CHOICES
        return named
    annotations, field = server_args.ServerArgs.__annotations__, "moe_a2a_backend"
    if isinstance(annotations[field], str):
        annotations[field] = get_type_hints(server_args.ServerArgs, include_extras=True)[field]
    choices: list[str] = next(item.choices for item in annotations[field].__metadata__ if hasattr(item, "choices"))
    return choices


def extend(enumeration: type[Enum], value: str) -> Any:
    """The member of ``enumeration`` with this value, added where it has none; SGLang looks members up by value."""
    if value not in enumeration._value2member_map_:
        member: Any = object.__new__(enumeration)
        member._name_, member._value_ = value.upper(), value
        member.__objclass__, member._sort_order_ = enumeration, len(enumeration._member_names_)
        enumeration._member_map_[member._name_] = member
        enumeration._member_names_.append(member._name_)
        enumeration._value2member_map_[value] = member
    return enumeration._value2member_map_[value]


__all__ = ["FLAGS", "NAME", "accept", "is_accepted", "is_active"]
