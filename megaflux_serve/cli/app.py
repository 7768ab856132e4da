"""The command ``megaflux`` as a whole: its help, its version, and how an error looks.

Decides which commands there are. An error of this library ends a command with one line on standard error and status 2.
To add a command, write it in a file of its own and register it at the end of this one.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from megaflux_serve import __version__
from megaflux_serve.cli import replay, routepack
from megaflux_serve.cli.calibrate import calibrate
from megaflux_serve.cli.command import Commands
from megaflux_serve.cli.compile import compile_kernels
from megaflux_serve.cli.doctor import doctor
from megaflux_serve.cli.plan import plan
from megaflux_serve.cli.top import top
from megaflux_serve.errors import MegafluxError

HELP = """Replica-aware mixture-of-experts layers: plan them, check the machine, place and schedule RL training.

[bold]Examples[/bold]

What would replication do for my routing, on 8 ranks with 2 replica slots each?

  [cyan]megaflux plan routed_experts.npz --ranks 8 --slots 2 --png loads.png[/cyan]

Can this machine run it, and if not, what is missing?

  [cyan]megaflux doctor[/cyan]

What does replication do now on a running server?

  [cyan]megaflux top 127.0.0.1:8000[/cyan]

Where should experts and trajectories of the next training window go?

  [cyan]megaflux routepack --help[/cyan]

Serve a model with it (vLLM finds the plugin by itself):

  [cyan]vllm serve MODEL --moe-backend megaflux --enable-expert-parallel --data-parallel-size 2[/cyan]
"""


class OneLineErrors(TyperGroup):
    """An error raised on purpose, or about a file, becomes one line and status 2; a fault keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MegafluxError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error
        except OSError as error:
            if error.filename is None:
                raise
            typer.echo(f"error: {error.filename}: {error.strerror}", err=True)
            raise typer.Exit(2) from error


app = Commands(name="megaflux", cls=OneLineErrors, help=HELP, rich_markup_mode="rich", no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megaflux-serve {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


app.command()(plan)
app.command()(doctor)
app.command()(calibrate)
app.command("compile")(compile_kernels)
app.command()(top)
app.add_typer(routepack.app)
app.add_typer(replay.app)


def main() -> None:
    """Entry point of the ``megaflux`` script."""
    app()
