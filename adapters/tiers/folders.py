"""The directory tree of a file tier, and the only place where names become paths.

::

    <root>/<shard id in hex>/<first byte of the digest in hex>/<digest in hex>    0600 in 0700
    <root>/tmp/<32 hex digits>     what is being written; locked by whoever writes it

Every directory below the root is opened on its own and by descriptor, and a symbolic link is opened
nowhere: nothing in the tree can lead out of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from typing import TYPE_CHECKING

from .file_index import folder_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmcache_kernels.transfer.serving.chunk_table import ChunkKey

    from .file_index import Folder

NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO})
"""Errors of a path at which nothing is, or something else than we put there."""

_TEMPORARY = "tmp"
_ID = re.compile("[0-9a-f]{64}")
_BYTE = re.compile("[0-9a-f]{2}")
_TOKEN = re.compile("[0-9a-f]{32}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # NONBLOCK: a pipe in the tree stops nobody


class Folders:
    """All methods raise OSError; nothing stays open."""

    def __init__(self, root: str) -> None:
        self.root = root

    def prepare(self) -> None:
        """Make the root, and remove what processes that have ended were writing."""
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        with self._temporary() as folder:
            for name in os.listdir(folder):
                if _TOKEN.fullmatch(name):
                    with contextlib.suppress(OSError), _Opened(name, os.O_RDWR, folder) as file:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(name, dir_fd=folder)

    # --- one chunk --------------------------------------------------------------------------------

    def size(self, key: ChunkKey) -> int | None:
        """Bytes of its file, if it is there."""
        with self._folder(folder_of(key)) as folder:
            status = os.stat(key[1].hex(), dir_fd=folder, follow_symlinks=False)
            return status.st_size if stat.S_ISREG(status.st_mode) else None

    def opened(self, key: ChunkKey) -> _Opened:
        """Its file, for reading."""
        with self._folder(folder_of(key)) as folder:
            file = _Opened(key[1].hex(), os.O_RDONLY, folder)
        if not stat.S_ISREG(os.fstat(file.descriptor).st_mode):
            file.close()
            raise OSError(errno.ENXIO, "not a regular file")
        return file

    @contextlib.contextmanager
    def written(self, key: ChunkKey, *, sync: bool) -> Iterator[int]:
        """A new file; when the block ends, and only then, it is that of this chunk.

        Args:
            sync: it is still there after the machine lost power.
        """
        token = secrets.token_hex(16)
        new = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with self._temporary() as temporary, _Opened(token, new, temporary) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield file
                if sync:
                    os.fsync(file)
                with self._folder(folder_of(key), make=True) as folder:
                    os.rename(token, key[1].hex(), src_dir_fd=temporary, dst_dir_fd=folder)
                    if sync:
                        os.fsync(folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(token, dir_fd=temporary)
                raise

    def remove(self, key: ChunkKey) -> None:
        """Its file, if it is there; of a symbolic link the link."""
        try:
            with self._folder(folder_of(key)) as folder:
                os.unlink(key[1].hex(), dir_fd=folder)
        except OSError as error:
            if error.errno not in NOT_THERE:
                raise

    # --- all of them ------------------------------------------------------------------------------

    def all(self) -> Iterator[Folder]:
        """The folders there are."""
        with self._root() as root:
            shards = [name for name in os.listdir(root) if _ID.fullmatch(name)]
        for shard in shards:
            try:
                with self._root() as root, _Opened(shard, _DIRECTORY, root) as folder:
                    names = [name for name in os.listdir(folder) if _BYTE.fullmatch(name)]
            except OSError as error:
                if error.errno not in NOT_THERE:
                    raise
                continue
            for name in names:
                yield bytes.fromhex(shard), int(name, 16)

    def listed(self, folder: Folder) -> dict[ChunkKey, tuple[float, int]]:
        """When each chunk in the folder was used, and the bytes of its file."""
        shard, first = folder
        found: dict[ChunkKey, tuple[float, int]] = {}
        try:
            with self._folder(folder) as descriptor, os.scandir(descriptor) as entries:
                for entry in entries:
                    if not _ID.fullmatch(entry.name) or int(entry.name[:2], 16) != first:
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            key = shard, bytes.fromhex(entry.name)
                            found[key] = status.st_mtime, status.st_size
        except OSError as error:
            if error.errno not in NOT_THERE:
                raise
        return found

    # --- inside -----------------------------------------------------------------------------------

    def _folder(self, folder: Folder, *, make: bool = False) -> _Opened:
        shard, first = folder
        with self._root() as root, _Opened(shard.hex(), _DIRECTORY, root, make) as middle:
            return _Opened(f"{first:02x}", _DIRECTORY, middle, make)

    def _temporary(self) -> _Opened:
        with self._root() as root:
            return _Opened(_TEMPORARY, _DIRECTORY, root, True)

    def _root(self) -> _Opened:
        try:
            return _Opened(self.root, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # not made again: maybe what was mounted there is away
            raise OSError(errno.ENODEV, "the directory has gone", self.root) from None


class _Opened:
    """A descriptor that is closed when the block ends; open from the start."""

    __slots__ = ("descriptor",)

    def __init__(
        self, name: str, flags: int, parent: int | None = None, make: bool = False
    ) -> None:
        flags |= os.O_CLOEXEC if flags & os.O_DIRECTORY else _FILE
        try:
            self.descriptor = os.open(name, flags, 0o600, dir_fd=parent)
        except FileNotFoundError:
            if not make:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=parent)
            self.descriptor = os.open(name, flags, dir_fd=parent)

    def __enter__(self) -> int:
        return self.descriptor

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.descriptor)
