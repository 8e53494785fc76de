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
                    with contextlib.suppress(OSError), _opened(name, os.O_RDWR, folder) as file:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(name, dir_fd=folder)

    # --- one chunk --------------------------------------------------------------------------------

    def size(self, key: ChunkKey) -> int | None:
        """Bytes of its file, if it is there."""
        with self._folder(folder_of(key)) as folder:
            status = os.stat(key[1].hex(), dir_fd=folder, follow_symlinks=False)
            return status.st_size if stat.S_ISREG(status.st_mode) else None

    @contextlib.contextmanager
    def opened(self, key: ChunkKey) -> Iterator[int]:
        """Its file, for reading."""
        with (
            self._folder(folder_of(key)) as folder,
            _opened(key[1].hex(), os.O_RDONLY, folder) as file,
        ):
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.ENXIO, "not a regular file")
            yield file

    @contextlib.contextmanager
    def written(self, key: ChunkKey, *, sync: bool) -> Iterator[int]:
        """A new file; when the block ends, and only then, it is that of this chunk.

        Args:
            sync: it is still there after the machine lost power.
        """
        token = secrets.token_hex(16)
        new = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with self._temporary() as temporary, _opened(token, new, temporary) as file:
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
        with self._opened_root() as root:
            shards = [name for name in os.listdir(root) if _ID.fullmatch(name)]
        for shard in shards:
            try:
                with self._opened_root() as root, _opened(shard, _DIRECTORY, root) as folder:
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

    @contextlib.contextmanager
    def _folder(self, folder: Folder, *, make: bool = False) -> Iterator[int]:
        shard, first = folder
        with (
            self._opened_root() as root,
            _opened(shard.hex(), _DIRECTORY, root, make) as middle,
            _opened(f"{first:02x}", _DIRECTORY, middle, make) as descriptor,
        ):
            yield descriptor

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[int]:
        with self._opened_root() as root, _opened(_TEMPORARY, _DIRECTORY, root, True) as descriptor:
            yield descriptor

    def _opened_root(self) -> contextlib.AbstractContextManager[int]:
        return _opened(self.root, os.O_RDONLY | os.O_DIRECTORY)


@contextlib.contextmanager
def _opened(name: str, flags: int, parent: int | None = None, make: bool = False) -> Iterator[int]:
    flags |= os.O_CLOEXEC if flags & os.O_DIRECTORY else _FILE
    try:
        descriptor = os.open(name, flags, 0o600, dir_fd=parent)
    except FileNotFoundError:
        if not make:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        descriptor = os.open(name, flags, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
