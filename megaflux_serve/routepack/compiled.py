"""How RoutePack compiles a function.

Decides the compiler's settings and knows nothing of what is compiled. Numba needs no compiler at installation: the
first call compiles, and the machine code is kept beside the source, or in the user's cache folder where that is not
writable. The global interpreter lock is released, so that search chains run as threads. ``fastmath`` stays off: with
it, sums would depend on the width of the vector unit, and a plan on the machine that made it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """``function`` as machine code with the same signature; arrays and numbers only."""
    return cast(Function, numba.njit(cache=True, nogil=True)(function))


def compiled_part(function: Function) -> Function:
    """The same for a function that only compiled functions of its own file call: Python cannot call it."""
    return cast(Function, numba.njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))
