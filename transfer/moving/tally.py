"""The fingerprints of chunks in flight: parts added up by kernels, totals brought to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .device import Device
    from .moves import Fingerprints

ENTRIES = 64
"""For which there are sums at first: one for each group of a chunk."""

RUNS, TOTALS = 16, 1024
"""How many runs of so many entries can wait for their fingerprints to be read before more pinned memory is
made, for which CUDA may wait for the device, with Python's lock."""

_MODULUS = 1 << 64


HEAD = 0
"""The entry of what runs move aside, see the staged path; those of the chunks are behind it."""


class _Run(NamedTuple):
    """A run whose fingerprints somebody may still read with ``reader``, who then has ``found`` them."""

    over: Any
    totals: torch.Tensor
    sums: torch.Tensor
    found: list[Fingerprints]
    reader: ref[Callable[[], list[Fingerprints]]]


class Tally:
    """Of the chunks that one path's kernels move, one run at a time.

    Args:
        stream: in which memory is made and cleared.
        rows: parts of a fingerprint.
        groups: of a chunk; each has its own total.
        where: the device, as torch spells it.
    """

    def __init__(self, device: Device, stream: Any, rows: int, groups: int, where: str) -> None:
        self._device = device
        self._stream = stream
        self._rows, self._groups, self._where = rows, groups, where
        self._runs: list[_Run] = []  # that are not over, or not read
        self._spare: list[torch.Tensor] = []
        self._head = self._zeros(1)  # never made anew: another stream than this may be using it
        self._make_room(ENTRIES)
        self._spare += self._device.pinned(RUNS * (1 + TOTALS)).split(1 + TOTALS)
        self._totals = self._spare[0]

    def _zeros(self, entries: int) -> torch.Tensor:
        """Of each entry the sums, and behind them a counter, see the copy kernel."""
        shape = entries, self._rows + 1
        with self._device.on(self._stream):
            return torch.zeros(shape, dtype=torch.int64, device=self._where)

    def _make_room(self, entries: int) -> None:
        self._sums = self._zeros(entries)
        self.sums = [self._head, *self._sums.split(1)]
        """int64[1, rows + 1] of each entry, zero when its kernels begin, and again behind the last of
        them."""

    def begin(self, chunks: int) -> None:
        """Make ready for a run of so many chunks."""
        self._runs = [run for run in self._runs if not self._ends(run)]
        entries = chunks * self._groups
        if entries >= len(self.sums):
            # Kernels that still use the old ones are in front of whatever gets that memory next.
            self._make_room(1 << (entries - 1).bit_length())
        for index, spare in enumerate(self._spare):
            if len(spare) > entries:
                self._totals = self._spare.pop(index)
                break
        else:
            self._totals = self._device.pinned(1 + max(entries, TOTALS))
        self._at = self._totals.data_ptr()

    def entry(self, chunk: int, group: int) -> int:
        return HEAD + 1 + chunk * self._groups + group

    def total_at(self, entry: int) -> int:
        """Where the kernel that is the entry's last writes its total."""
        return self._at + 8 * entry

    def when(
        self, over: Any, wanted: Sequence[Sequence[bool]], head: int | None
    ) -> Callable[[], list[Fingerprints]]:
        """How to read the run's fingerprints once the event ``over`` has passed; they stay until then.

        Args:
            wanted: per chunk and group, whether it was moved.
            head: the group of the first chunk part of whose total is that of the entry :data:`HEAD`.
        """
        totals, groups = self._totals, self._groups
        found: list[Fingerprints] = []

        def read() -> list[Fingerprints]:
            if wanted and not found:
                aside, *values = totals[: 1 + len(wanted) * groups].tolist()
                if head is not None:
                    values[head] += aside
                found.extend(
                    tuple(
                        total % _MODULUS if moved else None
                        for total, moved in zip(
                            values[first : first + groups], of_chunk, strict=True
                        )
                    )
                    for first, of_chunk in zip(range(0, len(values), groups), wanted, strict=True)
                )
                self._spare.append(totals)
            return found

        self._runs.append(_Run(over, totals, self._sums, found, ref(read)))
        return read

    def unused(self) -> None:
        """The run that began last was given up, and nothing of it is on the device any more."""
        self._spare.append(self._totals)

    def _ends(self, run: _Run) -> bool:
        """Whether nobody uses anything of the run any more."""
        if not run.over.query():
            return False
        unread = not run.found
        if unread and run.reader() is None:
            self._spare.append(run.totals)
            return True
        return not unread

    def clear(self) -> None:
        """Queue: forget what was added up."""
        self._device.run(self._stream, self._zero)

    def _zero(self) -> None:
        with self._device.on(self._stream):
            self._head.zero_()
            self._sums.zero_()
