"""The ``lmcache-kernels`` command. Each command loads what it needs when it is called, so that
``--help`` answers at once."""

from __future__ import annotations

import logging
import sys
from enum import Enum
from typing import Annotated

import typer

from lmcache_kernels import KVTransferError, __version__

app = typer.Typer(
    name="lmcache-kernels",
    help="Moves an LLM's KV cache: try it, serve it, or see what this machine has for it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class DeviceChoice(str, Enum):
    """Where the demo keeps its paged caches."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lmcache-kernels {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    if context.invoked_subcommand != "serve":  # which has a log of its own
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def serve(context: typer.Context) -> None:
    """Run a cache server until it is told to end; `serve --help` lists its settings."""
    from lmcache_kernels.adapters.server.main import run as run_server

    run_server(context.args, "lmcache-kernels serve")


@app.command()
def keys(
    directory: Annotated[str, typer.Argument(help="Where the two files are written.")],
    name: Annotated[str, typer.Argument(help="Whose they are, such as server or a host's name.")],
) -> None:
    """Make a pair of CURVE keys: NAME.key, for the other side, and NAME.key_secret, for nobody else."""
    from lmcache_kernels.adapters.messaging.curve import create_keys
    from lmcache_kernels.errors import ConfigError

    try:
        public, secret = create_keys(directory, name)
    except ConfigError as error:
        typer.echo(f"lmcache-kernels: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"public: {public}\nsecret: {secret}")


@app.command()
def demo(
    size_mb: Annotated[
        int, typer.Option("--size-mb", min=1, help="KV cache of each layout, in MB.")
    ] = 256,
    device: Annotated[
        DeviceChoice, typer.Option(help="auto takes a GPU if there is one.")
    ] = DeviceChoice.auto,
) -> None:
    """Store paged caches in a server, load them into other blocks, and verify every byte."""
    from .demo import run_demo

    raise typer.Exit(run_demo(size_mb=size_mb, device=device.value))


@app.command()
def top(
    url: Annotated[
        str, typer.Option(help="Where `serve --http-port` listens.")
    ] = "http://127.0.0.1:8080",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    token_file: Annotated[
        str, typer.Option(help="File with the token, for a server that other machines can reach.")
    ] = "",
) -> None:
    """Show live what a server does: tiers, throughput, hit ratio, workers, slow requests."""
    from .top import run_top

    raise typer.Exit(run_top(url, interval=interval, once=once, token_file=token_file))


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Measure (again) which way of copying is quickest for what."
        ),
    ] = False,
) -> None:
    """Tell what this machine has, what is short, and what to do about it.

    Exits with 1 if something that nothing works without is missing.
    """
    if calibrate:
        from .calibrate import run_calibration

        raise typer.Exit(run_calibration())
    from .doctor import run_doctor

    raise typer.Exit(run_doctor(as_json=json))


def run() -> None:
    """Entry point of the console script: errors we know become one line and exit status 1."""
    try:
        app()
    except KVTransferError as error:
        sys.exit(f"lmcache-kernels: {error}")
