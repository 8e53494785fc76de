"""Every page of a mapped file allocated now, by several threads, so that none is missing later.

``MADV_POPULATE_WRITE`` allocates, zeroes and maps pages as a write would, and where a write would
be a SIGBUS, because the file system is full, it is an error. Threads do it side by side. It goes
before ``posix_fallocate``, which holds the file's lock, so that threads do not help it, knows nothing
of the mapping's wish for 2 MB pages, and leaves the zeroing to the first touch. Only kernels before
5.14, which do not know the advice, get the latter instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

THREADS = 4
"""One thread touches 1.6-2.4 GB/s of shared memory in pages of 4 KB, 4 touch 5 GB/s, 8 and 16 no more
(16 cores beside an H200, Linux 6.18, 30 November 2026)."""

PIECE_BYTES = 64 << 20
"""What a thread takes at a time: 13 to 40 ms, after which an error or an interrupt is noticed."""

NO_ROOM = frozenset((errno.ENOSPC, errno.ENOMEM, errno.EFAULT, errno.EFBIG, errno.EDQUOT))
"""Errors that mean that there is not so much memory. EFAULT: a write would have been a SIGBUS."""

_MADV_POPULATE_WRITE = 23


def allocate_pages(address: int, nbytes: int, descriptor: int) -> None:
    """Allocate all pages of a file that is mapped, from its beginning on, at ``address``.

    They are of 2 MB if the file system was mounted with ``huge=advise`` or more.

    Raises:
        OSError: some could not be had, with an errno of ``NO_ROOM`` if there is no room for them.
            Others may have been allocated; they go when the file is cut or removed.
    """
    with contextlib.suppress(OSError):  # a kernel without 2 MB pages
        _advise(mmap.MADV_HUGEPAGE, address, nbytes)
    try:
        _in_parallel(
            lambda offset, size: _advise(_MADV_POPULATE_WRITE, address + offset, size), nbytes
        )
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _in_parallel(partial(os.posix_fallocate, descriptor), nbytes)


def _in_parallel(allocate: Callable[[int, int], None], nbytes: int) -> None:
    threads = min(THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, "lmcache-kernels-touch") as pool:
        pieces = [
            pool.submit(allocate, offset, min(PIECE_BYTES, nbytes - offset))
            for offset in range(0, nbytes, PIECE_BYTES)
        ]
        try:
            for piece in pieces:
                piece.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _advise(advice: int, address: int, nbytes: int) -> None:
    if _madvise()(address, nbytes, advice):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@cache
def _madvise() -> Callable[[int, int, int], int]:
    """Of the C library rather than of ``mmap``, because it must not hold up other Python threads."""
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function
