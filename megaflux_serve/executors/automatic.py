"""What the executor ``auto`` means where an engine runs: the megakernel unless something stands in its way.

Decides the rule and what the log says. Knows no engine: a plugin says what stands in the way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from megaflux_serve.errors import ConfigError, UnsupportedError


def automatic_executor(obstacle: Callable[[], str | None], num_ranks: int, logger: logging.Logger) -> str:
    """The executor that ``auto`` stands for, said in the log with the reason.

    Args:
        obstacle: why the megakernel cannot run, None if it can; it may raise that as the library's error instead.
        num_ranks: expert-parallel ranks.
        logger: of the engine.
    """
    on_host = "staged" if num_ranks > 1 else "reference"
    try:
        reason = obstacle()
    except (ConfigError, UnsupportedError) as error:
        reason = str(error)
    if reason is None:
        logger.info("executor 'auto' is 'megakernel' here")
        return "megakernel"
    logger.info("executor 'auto' is %r here, not 'megakernel': %s", on_host, reason)
    return on_host


def require_megakernel(obstacle: Callable[[], str | None]) -> None:
    """Refuse the megakernel, asked for by name, where it cannot run: before an engine starts its processes.

    Args:
        obstacle: as of ``automatic_executor``.

    Raises:
        ConfigError, UnsupportedError: what stands in the way.
    """
    if (reason := obstacle()) is not None:
        raise UnsupportedError("executor = 'megakernel'", reason, "leave it out, and the log says what runs instead")


__all__ = ["automatic_executor", "require_megakernel"]
