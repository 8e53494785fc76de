"""Chunks as files in a directory, which servers may share.

A file is the slot and its seal (:mod:`.sealing`), written under another name and renamed when it is
whole. Whatever is not exactly that is removed by whoever reads it. Room is bounded by bytes: the
file used least lately goes first, and its time of modification tells when that was, to other
servers and after a restart too.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_kernels.errors import ConfigError, TierUnavailable

from .batches import check_keys, check_shards
from .file_index import FileIndex, room_for
from .folders import NOT_THERE, Folders
from .sealing import SEAL_BYTES, is_sealed, seal, sealed_bytes
from .settings import flag, number, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lmcache_kernels.transfer.serving.chunk_table import ChunkKey
    from lmcache_kernels.transfer.tiering.tier import Place

    from .file_index import Folder
    from .settings import TierUrl

logger = logging.getLogger(__name__)

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

LARGE = 256 << 10
"""Bytes of a place from which on several threads are faster than one: of less, most of the time is the
interpreter's. Measured in memory on two cores: 0.5 times at 64 KiB, 2.8 at 1 MiB."""

TRIES = 4
"""At a chunk for which the disk has no room: where removing files does not make any, as with snapshots,
not all of them are to go."""

ROUNDS = 4
"""While as many bytes are written as the tier holds, the whole directory is looked at so often, folder
by folder, for what others have done to it."""


@dataclass(frozen=True, slots=True)
class FileSettings:
    """
    Attributes:
        size_gb: 1e9 bytes on disk of all files together.
        fsync: a chunk is on the disk before it is kept.
        threads: that copy and hash for one call.
    """

    size_gb: float = number(100.0, 1e-6, 1e9)
    fsync: bool = flag(False)
    threads: int = whole(4, 1, 64)


class FileTier:
    """Made by :meth:`from_url`.

    The calls of a file system cannot be given a time: on one that hangs, such as a network mount
    whose server is away, they hang with it.
    """

    name = "files"

    def __init__(self, root: str, settings: FileSettings) -> None:
        self._folders = Folders(root)
        self._settings = settings
        self._capacity = int(settings.size_gb * 1e9)
        self._lock = threading.Lock()  # over everything below, never held during a system call
        self._index = FileIndex()
        self._ready = False
        self._closed = False
        self._writing = 0  # bytes that are not yet in the index
        self._unseen = 0  # bytes written since a folder was last looked at
        self._counts = {"evicted": 0, "damaged": 0}
        self._looking = threading.Lock()
        self._round: Iterator[Folder] = iter(())
        self._threads = ThreadPoolExecutor(settings.threads, "lmcache-kernels-files")

    @classmethod
    def from_url(cls, url: TierUrl) -> FileTier:
        """``file:///directory?...``.

        Raises:
            ConfigError: a host, a path that is not absolute, or a wrong option.
        """
        if url.host or url.port is not None or url.user or url.password:
            raise ConfigError("file tier: expected file:///directory, got a host")
        if not url.path.strip("/") or "\0" in url.path:
            raise ConfigError(f"file tier: expected file:///directory, got {url.path!r}")
        return cls(url.path, url.settings(FileSettings))

    # --- Tier -------------------------------------------------------------------------------------

    def attach(self, arena: memoryview) -> None:
        """Looks at the files that are there, about a second for 200 000 of them."""
        try:
            self._prepare()
        except TierUnavailable as error:
            logger.warning("%s", error)

    def exists(self, keys: Sequence[ChunkKey]) -> list[bool]:
        check_keys(keys)
        self._prepare()
        with self._lock:
            known = [key in self._index for key in keys]
        return [there or self._is_there(key) for there, key in zip(known, keys, strict=True)]

    def get_into(self, keys: Sequence[ChunkKey], places: Sequence[Place]) -> list[bool]:
        check_keys(keys, places)
        self._prepare()
        return self._each(self._get, list(zip(keys, places, strict=True)))

    def put_from(self, keys: Sequence[ChunkKey], places: Sequence[Place]) -> list[bool]:
        check_keys(keys, places)
        self._prepare()
        done = self._each(self._put, list(zip(keys, places, strict=True)))
        self._see_others()
        return done

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        check_keys(keys)
        self._prepare()
        for key in keys:
            self._remove(key)

    def clear(self, shards: Sequence[bytes]) -> None:
        check_shards(shards)
        self._prepare()
        wanted = frozenset(shards)
        try:
            for folder in self._folders.all():
                if not wanted or folder[0] in wanted:
                    for key in self._folders.listed(folder):
                        self._remove(key)
        except OSError as error:
            raise self._away(error) from error

    def stats(self) -> dict[str, int]:
        """``used_bytes`` on disk, ``chunks`` as far as known; since the start ``evicted`` and ``damaged``."""
        with self._lock:
            return {
                "used_bytes": self._index.used_bytes,
                "chunks": len(self._index),
                **self._counts,
            }

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown(wait=True)

    # --- one chunk --------------------------------------------------------------------------------

    def _is_there(self, key: ChunkKey) -> bool:
        try:
            size = self._folders.size(key)
        except OSError as error:
            if error.errno in NOT_THERE:
                return False
            raise self._away(error) from error
        if size is None:
            return False
        with self._lock:
            self._index.add(key, size)
        return True

    def _get(self, key: ChunkKey, place: Place) -> bool:
        try:
            with self._folders.opened(key) as file:
                size = os.fstat(file).st_size
                if size != len(place) + SEAL_BYTES:
                    sealed = sealed_bytes(os.pread(file, SEAL_BYTES, max(size - SEAL_BYTES, 0)))
                    if sealed is not None and sealed + SEAL_BYTES == size:
                        return False  # a chunk, but of another length
                elif _read(file, place, found := bytearray(SEAL_BYTES)) and is_sealed(
                    key, place, found
                ):
                    os.utime(file)
                    with self._lock:
                        self._index.add(key, size)
                    return True
        except OSError as error:
            if error.errno in NOT_THERE:
                with self._lock:
                    self._index.forget(key)
                return False
            if error.errno != errno.EIO:
                raise self._away(error) from error
        logger.warning("file tier: chunk %s is damaged and goes", key[1].hex())
        with self._lock:
            self._counts["damaged"] += 1
        self._remove(key)
        return False

    def _put(self, key: ChunkKey, place: Place) -> bool:
        nbytes = len(place) + SEAL_BYTES
        if room_for(nbytes) > self._capacity:
            return False
        try:
            if self._folders.size(key) == nbytes:
                with self._lock:
                    self._index.add(key, nbytes)
                return True
        except OSError as error:
            if error.errno not in NOT_THERE:
                raise self._away(error) from error
        with self._lock:
            self._writing += room_for(nbytes)
        try:
            self._evict_to(self._capacity)
            for _ in range(TRIES):
                done = self._written(key, place)
                if done is not None or not self._evict(nbytes):
                    break
            return done is True
        finally:
            with self._lock:
                self._writing -= room_for(nbytes)

    def _written(self, key: ChunkKey, place: Place) -> bool | None:
        """Was it? None if the disk is full."""
        nbytes = len(place) + SEAL_BYTES
        try:
            with self._folders.written(key, sync=self._settings.fsync) as file:
                _write(file, place, seal(key, place))
        except OSError as error:
            if error.errno in NO_ROOM:
                return None
            if error.errno in NOT_THERE or error.errno == errno.EFBIG:
                return False
            raise self._away(error) from error
        with self._lock:
            self._index.add(key, nbytes)
            self._unseen += nbytes
        return True

    def _remove(self, key: ChunkKey) -> None:
        try:
            self._folders.remove(key)
        except OSError as error:
            raise self._away(error) from error
        with self._lock:
            self._index.forget(key)

    # --- all of them ------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Have the directory, and know what is in it."""
        if self._closed:
            raise TierUnavailable("file tier: closed")
        if self._ready:
            return
        with self._looking:
            if self._ready:
                return
            try:
                self._folders.prepare()
                found = [
                    (used, key, size)
                    for folder in self._folders.all()
                    for key, (used, size) in self._folders.listed(folder).items()
                ]
            except OSError as error:
                raise self._away(error) from error
            with self._lock:
                for _, key, size in sorted(found):
                    self._index.add(key, size)
            self._evict_to(self._capacity)
            self._ready = True

    def _evict_to(self, most: int) -> None:
        while True:
            with self._lock:
                oldest = self._index.oldest()
                if oldest is None or self._index.used_bytes + self._writing <= most:
                    return
                self._index.forget(oldest)
                self._counts["evicted"] += 1
            self._remove(oldest)

    def _evict(self, nbytes: int) -> bool:
        """Let so many bytes go; False if there is nothing that can."""
        with self._lock:
            before = self._index.used_bytes
            kept = before + self._writing - nbytes
        self._evict_to(kept)
        with self._lock:
            return self._index.used_bytes < before

    def _see_others(self) -> None:
        """Look at as many folders as it is time for."""
        if not self._looking.acquire(blocking=False):
            return
        try:
            with self._lock:
                folders = max(self._index.folders, 1)
                each = max(self._capacity // (ROUNDS * folders), 1)
                due, self._unseen = divmod(self._unseen, each)
            for _ in range(min(due, folders)):
                folder = next(self._round, None)
                if folder is None:
                    self._round = self._folders.all()
                    continue
                found = {key: size for key, (_, size) in self._folders.listed(folder).items()}
                with self._lock:
                    self._index.correct(folder, found)
        except OSError as error:
            raise self._away(error) from error
        finally:
            self._looking.release()
        self._evict_to(self._capacity)

    def _each(
        self, work: Callable[[ChunkKey, Place], bool], jobs: Sequence[tuple[ChunkKey, Place]]
    ) -> list[bool]:
        """All jobs are over when it returns, also if one has failed."""
        if sum(len(place) for _, place in jobs) < len(jobs) * LARGE or len(jobs) == 1:
            return [work(*job) for job in jobs]
        running: list[Future[bool]] = []
        try:
            running.extend(self._threads.submit(work, *job) for job in jobs)
        except RuntimeError as error:
            raise TierUnavailable("file tier: closed") from error
        finally:
            wait(running)
        return [one.result() for one in running]

    def _away(self, error: OSError) -> TierUnavailable:
        return TierUnavailable(f"file tier {self._folders.root}: {error}")


def _read(file: int, place: Place, rest: bytearray) -> bool:
    """Fill both from the start of the file; False if it is shorter."""
    parts = [place, memoryview(rest)]
    position = 0
    while parts:
        got = os.preadv(file, parts, position)
        if not got:
            return False
        position += got
        parts = _behind(parts, got)
    return True


def _write(file: int, place: Place, rest: bytes) -> None:
    parts = [place, memoryview(rest)]
    position = 0
    while parts:
        put = os.pwritev(file, parts, position)
        position += put
        parts = _behind(parts, put)


def _behind(parts: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the parts behind the first so many bytes."""
    left = []
    for part in parts:
        if done < len(part):
            left.append(part[done:])
        done = max(done - len(part), 0)
    return left
