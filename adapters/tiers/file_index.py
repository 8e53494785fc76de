"""Which files there are, how much they take, and which of them was used least lately. Pure.

Only a picture: others may share the directory, so what is in here may have gone, and there may be
more.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmcache_kernels.transfer.serving.chunk_table import ChunkKey

Folder: TypeAlias = tuple[bytes, int]
"""(shard id, first byte of the digests in it)."""

BLOCK = 4096
"""Bytes in which file systems give out room, and in which files are counted."""


def folder_of(key: ChunkKey) -> Folder:
    return key[0], key[1][0]


def room_for(nbytes: int) -> int:
    """What a file of so many bytes takes."""
    return -(-nbytes // BLOCK) * BLOCK


class FileIndex:
    """Every operation costs O(1) for each file named. Not for several threads at once."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self._room: OrderedDict[ChunkKey, int] = OrderedDict()  # least lately used first
        self._folders: dict[Folder, set[ChunkKey]] = {}

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._room

    def __len__(self) -> int:
        return len(self._room)

    @property
    def folders(self) -> int:
        """How many have a file."""
        return len(self._folders)

    def add(self, key: ChunkKey, nbytes: int) -> None:
        """It is there, so many bytes long, and was used just now."""
        self.forget(key)
        self._room[key] = room_for(nbytes)
        self.used_bytes += room_for(nbytes)
        self._folders.setdefault(folder_of(key), set()).add(key)

    def forget(self, key: ChunkKey) -> None:
        """It is not there, maybe not any more."""
        room = self._room.pop(key, None)
        if room is None:
            return
        self.used_bytes -= room
        folder = folder_of(key)
        self._folders[folder].discard(key)
        if not self._folders[folder]:
            del self._folders[folder]

    def oldest(self) -> ChunkKey | None:
        """The one used least lately."""
        return next(iter(self._room), None)

    def correct(self, folder: Folder, found: Mapping[ChunkKey, int]) -> None:
        """In this folder there are just these, so many bytes each."""
        for key in self._folders.get(folder, set()) - found.keys():
            self.forget(key)
        for key in found.keys() - self._folders.get(folder, set()):
            self.add(key, found[key])
