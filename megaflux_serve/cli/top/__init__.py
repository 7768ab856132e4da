"""``megaflux top``: looks at /metrics (``scrape``), makes figures of them (``figures``), shows them (``view``)."""

from megaflux_serve.cli.top.command import top

__all__ = ["top"]
