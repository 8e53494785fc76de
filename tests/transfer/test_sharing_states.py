"""Any sequence of batches, failures, writes and deaths of tensors, against a model of two memories."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from lmcache_kernels.errors import LayoutError
from lmcache_kernels.transfer.memory.arena import SHM_DIRECTORY
from lmcache_kernels.transfer.sharing.wrapping import wrap_kv_caches

SLICES = [slice(0, 40), slice(40, 64), slice(0, 64)]
STORAGES = 3
VIEWS = [(storage, view) for storage in range(STORAGES) for view in range(len(SLICES))]
some_view = st.sampled_from(VIEWS)


class SharedStorages(RuleBasedStateMachine):
    """Each storage has old memory and, while a view lies in it, a segment; each view lies in one."""

    def __init__(self):
        super().__init__()
        self.views, self.memory, self.segment = {}, {}, {}
        for storage in range(STORAGES):
            raw = torch.full((64,), storage, dtype=torch.uint8)
            self.memory[storage, "old"] = bytearray(raw.tolist())
            for view, part in enumerate(SLICES):
                count = part.stop - part.start
                tensor = torch.empty(0, dtype=torch.uint8)
                tensor.set_(raw.untyped_storage(), part.start, (count,), (1,))
                self.views[storage, view] = [tensor, "old"]

    @rule(chosen=st.lists(some_view, min_size=1, max_size=5), fails=st.booleans())
    def wrap(self, chosen, fails):
        caches = {str(name): self.views[name][0] for name in chosen if name in self.views}
        if fails:
            with pytest.raises(LayoutError):
                wrap_kv_caches({**caches, "bad": torch.zeros(4, 8)[:, :6]})
            return
        wrapped = iter(wrap_kv_caches(caches).descriptors)
        for name in dict.fromkeys(name for name in chosen if name in self.views):
            storage, share = name[0], next(wrapped).share
            if storage not in self.segment:
                self.segment[storage] = share.segment
                self.memory[storage, "new"] = bytearray(self.memory[storage, "old"])
            assert share.segment == self.segment[storage]
            assert (share.nbytes, share.offset) == (64, SLICES[name[1]].start)
            self.views[name][1] = "new"

    @rule(name=some_view, byte=st.integers(0, 255))
    def write(self, name, byte):
        if name in self.views:
            tensor, home = self.views[name]
            tensor.fill_(byte)
            self.memory[name[0], home][SLICES[name[1]]] = bytes([byte]) * len(tensor)

    @rule(name=some_view)
    def die(self, name):
        self.views.pop(name, None)
        homes = {home for (storage, _), (_, home) in self.views.items() if storage == name[0]}
        if "new" not in homes and name[0] in self.segment:
            gone = self.segment.pop(name[0])
            assert not (SHM_DIRECTORY / gone).exists()

    @invariant()
    def every_view_has_the_bytes_of_its_memory(self):
        for (storage, view), (tensor, home) in self.views.items():
            assert bytes(tensor.tolist()) == self.memory[storage, home][SLICES[view]]

    @invariant()
    def views_of_one_memory_are_views_of_one_memory(self):
        starts = {
            (storage, home, tensor.data_ptr() - SLICES[view].start)
            for (storage, view), (tensor, home) in self.views.items()
        }
        assert len(starts) == len({(storage, home) for storage, home, _ in starts})

    @invariant()
    def segments_in_use_are_there(self):
        assert set(self.segment.values()) <= set(os.listdir(SHM_DIRECTORY))


def test_mp_d25_whatever_happens_views_and_segments_agree(caplog):
    """Failed batches change nothing; whatever succeeds keeps the views of a storage together."""
    caplog.set_level("ERROR")
    run_state_machine_as_test(
        SharedStorages, settings=settings(max_examples=60, stateful_step_count=25)
    )
