"""A process of workers that use a server as hard as they can: look up, load, store, let go.

Each worker is a thread with a client and an arena mapping of its own. What it loads it verifies. The
parent says ``go`` and, some time later, ``stop``, a line each; then it gets a :class:`Report`.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import traceback
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec

from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.transfer.asking import ask
from lmcache_kernels.transfer.engine_driven.attachment import Attachment
from lmcache_kernels.transfer.memory.arena import Arena
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES
from lmcache_kernels.transfer.messages import (
    CommitRetrieve,
    CommitStore,
    Done,
    EndSession,
    Found,
    LoadSlots,
    Lookup,
    PrepareRetrieve,
    PrepareStore,
    Register,
    Registered,
    Reply,
    Request,
    StoreSlots,
)

from .payloads import Payloads, Prompts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

R = TypeVar("R", bound=Reply)

SHARD = bytes(32)
TIMEOUT = 20.0
MOST_ERRORS = 10
"""That are told of; the others are counted."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    url: of the server.
    first: number of the first worker of this process, of ``workers``.
    chunk_bytes: payload of a chunk.
    chunks, prompts, families: see :class:`.payloads.Prompts`.
    niceness: of the process.
    """

    url: str
    first: int
    workers: int
    chunk_bytes: int
    chunks: int
    prompts: int
    families: int
    niceness: int


class Report(msgspec.Struct):
    """What the workers of a process have seen.

    Attributes:
        calls: per kind of request, when each was answered (monotonic seconds) and how long that took.
        wrong: chunks that were not what they should be.
        failed: calls and prompts that ended otherwise than they should.
        errors: some of what went wrong, in words.
    """

    calls: dict[str, list[tuple[float, float]]]
    loaded: int = 0
    stored: int = 0
    wrong: int = 0
    failed: int = 0
    errors: list[str] = []


class Worker:
    """One of them: registered, its arena mapped, when it is made."""

    def __init__(self, settings: Settings, number: int) -> None:
        self.report = Report(defaultdict(list))
        self._settings = settings
        self._number = number
        self._chance = random.Random(number)
        self._payloads = Payloads(settings.chunk_bytes)
        self._prompts = Prompts(settings.chunks, settings.prompts, settings.families)
        self._client = CacheClient(settings.url, instance_id=number, name=f"load-{number}")
        self._client.wait_ready(TIMEOUT)
        register = Register(instance=number, shard=SHARD, chunk_bytes=settings.chunk_bytes)
        registered = ask(self._client, register, Registered, TIMEOUT)
        self._slots = Attachment(
            registered,
            incarnation=str(self._client.incarnation),
            shard=SHARD,
            payload_bytes=settings.chunk_bytes,
            pin=False,
        )
        self._arena = Arena.attach(registered.arena_name, registered.arena_bytes)

    def run(self, stop: threading.Event) -> None:
        """One prompt after the other."""
        count = 0
        while not stop.is_set():
            count += 1
            try:
                with self._timed("prompt"):
                    self._serve(f"{self._number}-{count}", self._prompts.draw(self._chance))
            except Exception:
                self._failed(traceback.format_exc(limit=-2))

    def close(self) -> None:
        self._slots.retire()
        self._arena.close()
        self._client.close()

    def _serve(self, request: str, digests: Sequence[bytes]) -> None:
        packed = b"".join(digests)
        lookup = Lookup(request=request, shards=[SHARD], digests=packed)
        found = self._ask("lookup", lookup, Found).chunks
        try:
            if found:
                self._load(digests[:found])
            if found < len(digests):
                self._store(digests[found:])
        finally:
            self._ask("end session", EndSession(request=request), Done)

    def _load(self, digests: Sequence[bytes]) -> None:
        prepare = PrepareRetrieve(instance=self._number, digests=b"".join(digests))
        slots = self._ask("prepare retrieve", prepare, LoadSlots)
        if len(slots.offsets) != len(digests):
            self._failed(f"of {len(digests)} chunks that are leased {len(slots.offsets)} came")
        self._slots.check_slots(slots.offsets)
        for digest, offset in zip(digests, slots.offsets, strict=False):
            named = self._slots.fingerprints_of(offset, digest) is not None
            if not named or not self._payloads.is_at(self._payload(offset), digest):
                self.report.wrong += 1
        self.report.loaded += len(slots.offsets)
        commit = CommitRetrieve(instance=self._number, ticket=slots.ticket)
        self._ask("commit retrieve", commit, Done)

    def _store(self, digests: Sequence[bytes]) -> None:
        prepare = PrepareStore(instance=self._number, digests=b"".join(digests))
        slots = self._ask("prepare store", prepare, StoreSlots)
        if not slots.indices:
            return
        self._slots.check_slots(slots.offsets)
        for index, offset in zip(slots.indices, slots.offsets, strict=True):
            self._slots.erase_header(offset)
            self._payloads.write(self._payload(offset), digests[index])
            self._slots.write_header(offset, digests[index], (0,))
        self.report.stored += len(slots.indices)
        self._ask("commit store", CommitStore(instance=self._number, ticket=slots.ticket), Done)

    def _payload(self, offset: int) -> memoryview:
        return self._arena.view(offset + HEADER_BYTES, self._settings.chunk_bytes)

    def _ask(self, kind: str, message: Request, reply_type: type[R]) -> R:
        with self._timed(kind):
            return ask(self._client, message, reply_type, TIMEOUT)

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        now = time.monotonic()
        self.report.calls[kind].append((now, now - began))

    def _failed(self, what: str) -> None:
        self.report.failed += 1
        if len(self.report.errors) < MOST_ERRORS:
            self.report.errors.append(what)


def together(reports: Sequence[Report]) -> Report:
    """The sum."""
    calls: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    total = Report(calls)
    for report in reports:
        for kind, some in report.calls.items():
            calls[kind] += some
        for name in ("loaded", "stored", "wrong", "failed"):
            setattr(total, name, getattr(total, name) + getattr(report, name))
        total.errors += report.errors
    return total


def main(settings: Settings) -> None:
    """Connect, say ``ready``, run when told to, report."""
    os.nice(settings.niceness)
    numbers = range(settings.first, settings.first + settings.workers)
    workers = [Worker(settings, number) for number in numbers]
    print("ready", flush=True)
    if sys.stdin.readline() == "go\n":
        stop = threading.Event()
        threads = [threading.Thread(target=worker.run, args=(stop,)) for worker in workers]
        for thread in threads:
            thread.start()
        sys.stdin.readline()  # also when the parent has ended
        stop.set()
        for thread in threads:
            thread.join()
    for worker in workers:
        worker.close()
    report = together([worker.report for worker in workers])
    print(msgspec.json.encode(report).decode(), flush=True)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Settings))
