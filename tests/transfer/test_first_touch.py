"""Pages are allocated by several threads, whatever the kernel knows, and errors come through."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from lmcache_kernels.transfer.memory import first_touch
from lmcache_kernels.transfer.memory.arena import SHM_DIRECTORY

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def mapped():
    """Maps a new file of shared memory that has no page yet: its address and descriptor."""
    with ExitStack() as opened:

        def make(nbytes: int) -> tuple[int, int]:
            file = opened.enter_context(tempfile.TemporaryFile(dir=SHM_DIRECTORY))
            file.truncate(nbytes)
            memory = opened.enter_context(mmap.mmap(file.fileno(), nbytes))
            assert allocated(file.fileno()) == 0
            return ctypes.addressof(ctypes.c_char.from_buffer(memory)), file.fileno()

        yield make


def allocated(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


@pytest.mark.parametrize("pages", [1, 3, 4, 5, 64])
def test_every_page_is_there_afterwards(mapped, monkeypatch, pages: int) -> None:
    monkeypatch.setattr(first_touch, "PIECE_BYTES", 2 * PAGE)
    address, descriptor = mapped(pages * PAGE - 1)
    first_touch.allocate_pages(address, pages * PAGE - 1, descriptor)
    assert allocated(descriptor) == pages * PAGE
    assert ctypes.string_at(address, pages * PAGE - 1) == bytes(pages * PAGE - 1)


def test_several_threads_take_part(mapped, monkeypatch) -> None:
    """Each of the first pieces waits for the others, which only threads of their own can be."""
    monkeypatch.setattr(first_touch, "PIECE_BYTES", PAGE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    address, descriptor = mapped(2 * first_touch.THREADS * PAGE)
    together = threading.Barrier(first_touch.THREADS)
    advise = first_touch._advise

    def wait_for_the_others(advice: int, at: int, nbytes: int) -> None:
        if advice == first_touch._MADV_POPULATE_WRITE:
            together.wait(30)
        advise(advice, at, nbytes)

    monkeypatch.setattr(first_touch, "_advise", wait_for_the_others)
    first_touch.allocate_pages(address, 2 * first_touch.THREADS * PAGE, descriptor)
    assert allocated(descriptor) == 2 * first_touch.THREADS * PAGE


def test_a_kernel_that_does_not_know_the_advice_allocates_all_the_same(mapped, monkeypatch) -> None:
    monkeypatch.setattr(first_touch, "_MADV_POPULATE_WRITE", 12345)
    address, descriptor = mapped(9 * PAGE)
    first_touch.allocate_pages(address, 9 * PAGE, descriptor)
    assert allocated(descriptor) == 9 * PAGE


def test_an_error_of_any_piece_is_raised_and_ends_the_rest(mapped, monkeypatch) -> None:
    monkeypatch.setattr(first_touch, "PIECE_BYTES", PAGE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    touched, noticed = [], threading.Event()
    shutdown = ThreadPoolExecutor.shutdown

    def third_time_unlucky(advice: int, at: int, nbytes: int) -> None:
        if advice == first_touch._MADV_POPULATE_WRITE:
            touched.append(at)
            if len(touched) == 3:
                raise OSError(errno.EFAULT, "full")
            assert len(touched) < 3 or noticed.wait(30)

    def noticing(pool: ThreadPoolExecutor, **options: bool) -> None:
        shutdown(pool, **options)
        noticed.set()

    monkeypatch.setattr(first_touch, "_advise", third_time_unlucky)
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", noticing)
    address, descriptor = mapped(1000 * PAGE)
    with pytest.raises(OSError, match="full") as caught:
        first_touch.allocate_pages(address, 1000 * PAGE, descriptor)
    assert caught.value.errno in first_touch.NO_ROOM
    assert len(touched) <= 4


def test_pages_behind_the_end_of_the_file_are_an_error_and_no_sigbus(mapped) -> None:
    address, descriptor = mapped(4 * PAGE)
    os.ftruncate(descriptor, PAGE)
    with pytest.raises(OSError, match="address") as caught:
        first_touch.allocate_pages(address, 4 * PAGE, descriptor)
    assert caught.value.errno == errno.EFAULT
