"""The ``megaflux`` command. A command parses, calls and prints; what it prints is computed in modules of its own."""

from megaflux_serve.cli.app import app, main

__all__ = ["app", "main"]
