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
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")


@app.command()
def serve(
    host: Annotated[
        str, typer.Option(help="Address to bind: without keys a loopback one.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="TCP port to bind; 0 takes a free one.")
    ] = 5555,
    l1_size_gb: Annotated[
        float,
        typer.Option(
            "--l1-size-gb",
            min=0.001,
            help="Host memory for chunks (the first level), in GiB of /dev/shm.",
        ),
    ] = 4.0,
    chunk_size: Annotated[
        int, typer.Option("--chunk-size", min=1, help="Tokens of one chunk; engines must agree.")
    ] = 256,
    eviction_policy: Annotated[
        str,
        typer.Option(
            help="Which idle chunk goes first: lru (idle for longest) or s3fifo (those that nobody "
            "has found since they were stored, so that prompts seen once do not push out shared "
            "prefixes)."
        ),
    ] = "lru",
    eviction_trigger_watermark: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Used part of the memory at which some is freed ahead; 1: never."
        ),
    ] = 1.0,
    eviction_ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Part of the memory that is freed then.")
    ] = 0.2,
    worker_reap_timeout_seconds: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Silence after which a worker that has pinged is dropped, and what it was writing "
            "discarded: at least 30, or 0 for never.",
        ),
    ] = 120.0,
    worker_registration_grace_seconds: Annotated[
        float, typer.Option(min=0.0, help="The same of a worker that has not pinged yet.")
    ] = 600.0,
    curve_secret_key: Annotated[
        str, typer.Option(help="The server's *.key_secret file: whoever connects needs a key, too.")
    ] = "",
    curve_clients: Annotated[
        str, typer.Option(help="Directory of the *.key files of those who may connect.")
    ] = "",
) -> None:
    """Run a cache server until it is interrupted."""
    from lmcache_kernels.adapters.server.main import serve as run_server

    logging.getLogger().setLevel(logging.INFO)
    run_server(
        host=host,
        port=port,
        size_gb=l1_size_gb,
        chunk_size=chunk_size,
        eviction_policy=eviction_policy,
        eviction_watermark=eviction_trigger_watermark,
        eviction_ratio=eviction_ratio,
        worker_reap_timeout=worker_reap_timeout_seconds,
        worker_registration_grace=worker_registration_grace_seconds,
        curve_secret_key=curve_secret_key,
        curve_clients=curve_clients,
    )


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
