"""What a tier costs beside the plain use of what it stands on: chunks put, fetched and looked for.

Ours checks and seals every chunk, and makes it visible all at once; a plain contender writes and
reads one file, value or object for each. Services are started here, on loopback. Needs no GPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lmcache_kernels.adapters.tiers.mooncake_client import address, connect
from lmcache_kernels.adapters.tiers.opening import open_tier

from .results import OURS, Row, with_ratios
from .timing import spread_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lmcache_kernels.transfer.serving.chunk_table import ChunkKey

    from .options import Options

PLAIN = "plain"
SLOTS = (64 << 10, 1 << 20, 4 << 20)
DIRECTIONS = ("put", "get", "exists")
PATIENCE = 30.0
"""Seconds that a service may take to start."""


class Absent(Exception):
    """Why a tier cannot be measured here."""


class Contender(Protocol):
    """Keeps the chunks of one :class:`Chunks`. What is not timed: ``forget``."""

    def put(self) -> None: ...
    def get(self) -> None: ...
    def exists(self) -> int: ...
    def forget(self) -> None: ...


@dataclass(frozen=True)
class Chunks:
    """Slots in one arena: what is put, and as much room for what is fetched."""

    arena: memoryview
    keys: list[ChunkKey]
    slot: int

    @classmethod
    def of(cls, slot: int, count: int) -> Chunks:
        arena = memoryview(mmap.mmap(-1, 2 * count * slot))
        arena[: count * slot] = secrets.token_bytes(slot) * count
        shard = secrets.token_bytes(32)
        return cls(arena, [(shard, secrets.token_bytes(32)) for _ in range(count)], slot)

    @property
    def nbytes(self) -> int:
        return len(self.keys) * self.slot

    @property
    def names(self) -> list[str]:
        return [digest.hex() for _, digest in self.keys]

    @property
    def sources(self) -> list[memoryview]:
        return self._slots(0)

    @property
    def targets(self) -> list[memoryview]:
        return self._slots(self.nbytes)

    def arrived(self) -> bool:
        return self.arena[: self.nbytes] == self.arena[self.nbytes :]

    def _slots(self, first: int) -> list[memoryview]:
        return [
            self.arena[at : at + self.slot] for at in range(first, first + self.nbytes, self.slot)
        ]


class OurTier:
    def __init__(self, url: str, chunks: Chunks) -> None:
        self._tier = open_tier(url)
        self._tier.attach(chunks.arena)
        self._chunks = chunks

    def put(self) -> None:
        _all(self._tier.put_from(self._chunks.keys, self._chunks.sources))

    def get(self) -> None:
        _all(self._tier.get_into(self._chunks.keys, self._chunks.targets))

    def exists(self) -> int:
        return sum(self._tier.exists(self._chunks.keys))

    def forget(self) -> None:
        self._tier.remove(self._chunks.keys)

    def close(self) -> None:
        self._tier.close()


class PlainFiles:
    def __init__(self, folder: Path, chunks: Chunks) -> None:
        folder.mkdir()
        self._paths = [folder / name for name in chunks.names]
        self._chunks = chunks

    def put(self) -> None:
        for path, source in zip(self._paths, self._chunks.sources, strict=True):
            with open(path, "wb", buffering=0) as file:
                file.write(source)

    def get(self) -> None:
        for path, target in zip(self._paths, self._chunks.targets, strict=True):
            with open(path, "rb", buffering=0) as file:
                file.readinto(target)

    def exists(self) -> int:
        return sum(os.path.exists(path) for path in self._paths)

    def forget(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)


class PlainValkey:
    """The package as it comes, as many bytes in a pipeline as ours."""

    def __init__(self, port: int, chunks: Chunks) -> None:
        from valkey import Valkey

        self._client = Valkey(port=port)
        self._chunks = chunks
        self._names = [f"plain:{name}" for name in chunks.names]
        self._batch = max((8 << 20) // chunks.slot, 1)

    def put(self) -> None:
        sources = self._chunks.sources
        self._each(lambda pipe, i: pipe.set(self._names[i], sources[i]))

    def get(self) -> None:
        values = self._each(lambda pipe, i: pipe.get(self._names[i]))
        for value, target in zip(values, self._chunks.targets, strict=True):
            target[:] = value

    def exists(self) -> int:
        return sum(self._each(lambda pipe, i: pipe.exists(self._names[i])))

    def forget(self) -> None:
        self._each(lambda pipe, i: pipe.unlink(self._names[i]))

    def close(self) -> None:
        self._client.close()

    def _each(self, command: Callable[[Any, int], object]) -> list[Any]:
        replies = []
        for first in range(0, len(self._chunks.keys), self._batch):
            pipe = self._client.pipeline(transaction=False)
            for i in range(first, min(first + self._batch, len(self._chunks.keys))):
                command(pipe, i)
            replies += pipe.execute()
        return replies


class PlainMooncake:
    """The store's own batch calls on the arena, registered."""

    def __init__(self, port: int, chunks: Chunks) -> None:
        self._store = _mooncake(port, chunks)
        self._names = [f"plain:{name}" for name in chunks.names]
        self._sizes = [chunks.slot] * len(chunks.keys)
        self._sources = [address(place) for place in chunks.sources]
        self._targets = [address(place) for place in chunks.targets]

    def put(self) -> None:
        codes = self._store.batch_put_from(self._names, self._sources, self._sizes)
        _all([code == 0 for code in codes])

    def get(self) -> None:
        codes = self._store.batch_get_into(self._names, self._targets, self._sizes)
        _all([code > 0 for code in codes])

    def exists(self) -> int:
        return sum(self._store.batch_is_exist(self._names))

    def forget(self) -> None:
        self._store.batch_remove(self._names, True)

    def close(self) -> None:
        self._store.close()


@contextlib.contextmanager
def files(chunks: Chunks) -> Iterator[dict[str, Contender]]:
    folder = Path(tempfile.mkdtemp(prefix="lmcache_kernels_bench_"))
    url = f"file://{folder}/ours?size_gb={2 * chunks.nbytes / 1e9 + 1}"
    try:
        with contextlib.closing(OurTier(url, chunks)) as ours:
            yield {OURS: ours, PLAIN: PlainFiles(folder / PLAIN, chunks)}
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def valkey(chunks: Chunks) -> Iterator[dict[str, Contender]]:
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None or importlib.util.find_spec("valkey") is None:
        raise Absent("needs redis-server or valkey-server, and the package valkey")
    port = _free_port()
    with (
        _started([program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""], port),
        contextlib.closing(
            OurTier(f"valkey://127.0.0.1:{port}?timeout_seconds=60", chunks)
        ) as ours,
        contextlib.closing(PlainValkey(port, chunks)) as plain,
    ):
        yield {OURS: ours, PLAIN: plain}


@contextlib.contextmanager
def mooncake(chunks: Chunks) -> Iterator[dict[str, Contender]]:
    """The memory is this process's own: no network is measured."""
    found = importlib.util.find_spec("mooncake")
    if found is None or found.origin is None:
        raise Absent("needs the package mooncake")
    port = _free_port()
    command = [str(Path(found.origin).with_name("mooncake_master")), f"--rpc_port={port}"]
    command += [
        "--rpc_address=127.0.0.1",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={_free_port()}",
    ]
    url = f"mooncake://127.0.0.1:{port}?segment_gb={2 * chunks.nbytes / 1e9}&timeout_seconds=10"
    with (
        _started(command, port),
        contextlib.closing(OurTier(url, chunks)) as ours,
        contextlib.closing(PlainMooncake(port, chunks)) as plain,
    ):
        yield {OURS: ours, PLAIN: plain}


TIERS = {"files": files, "valkey": valkey, "mooncake": mooncake}


def run(options: Options) -> list[Row]:
    """Measure every tier with every size of slot, and print the rows."""
    rows: list[Row] = []
    for tier, started in TIERS.items():
        for slot in SLOTS:
            case = f"{slot >> 10} KiB"
            if not any(options.wants(f"{tier} {case} {direction}") for direction in DIRECTIONS):
                continue
            chunks = Chunks.of(slot, max((options.size_mb << 20) // slot, 1))
            try:
                with started(chunks) as contenders:
                    found = measure(tier, case, chunks, contenders, options.rounds)
            except Absent as error:
                print(f"{tier}: not measured: {error}", flush=True)
                break
            for row in found:
                print(line(row), flush=True)
            rows += found
    return rows


def measure(
    tier: str, case: str, chunks: Chunks, contenders: dict[str, Contender], rounds: int
) -> list[Row]:
    """A row for each direction; in every round each contender does all three, with its bytes compared."""
    seconds: dict[str, dict[str, list[float]]] = {
        direction: {name: [] for name in contenders} for direction in DIRECTIONS
    }
    exact = True
    for turn in range(-1, rounds):
        for name, contender in contenders.items():
            contender.forget()
            chunks.arena[chunks.nbytes :] = bytes(chunks.nbytes)
            for direction in DIRECTIONS:
                began = time.perf_counter()
                getattr(contender, direction)()
                seconds[direction][name] += [time.perf_counter() - began] if turn >= 0 else []
            exact = exact and chunks.arrived() and contender.exists() == len(chunks.keys)
            contender.forget()
    return [
        with_ratios(
            Row(
                part=tier,
                case=f"{len(chunks.keys)} x {case}",
                variant="plain",
                direction=direction,
                ids="random",
                bytes=0 if direction == "exists" else chunks.nbytes,
                run_bytes=0,
                max_programs=None,
                bit_exact=exact,
                traffic=1,
                ceiling="",
                seconds={name: spread_of(times) for name, times in seconds[direction].items()},
            )
        )
        for direction in DIRECTIONS
    ]


def line(row: Row) -> str:
    """One row for the terminal."""
    ours, plain = (
        f"{row.gb_s(name):8.2f} GB/s" if row.bytes else f"{row.seconds[name].p50 * 1e3:8.2f} ms"
        for name in (OURS, PLAIN)
    )
    return f"{row.title:42} {ours}  plain {plain}  ratio {row.ratios[PLAIN]:.2f}"


def _all(done: Sequence[bool]) -> None:
    if not all(done):
        raise ValueError(f"expected {len(done)} chunks moved, got {sum(done)}")


def _mooncake(port: int, chunks: Chunks) -> Any:
    store = connect(
        ("127.0.0.1", port),
        10,
        local_hostname="127.0.0.1",
        metadata_server="P2PHANDSHAKE",
        global_segment_size=2 * chunks.nbytes,
        protocol="tcp",
    )
    _all([store.register_buffer(address(chunks.arena), len(chunks.arena)) == 0])
    return store


@contextlib.contextmanager
def _started(command: list[str], port: int) -> Iterator[None]:
    """A process that listens on the port."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
    deadline = time.monotonic() + PATIENCE
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise Absent(f"{command[0]} does not start")
        yield
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
