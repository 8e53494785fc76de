"""The context in which the server copies, of a CPU engine whose cache lies in shared memory."""

from __future__ import annotations

import cachekit
import pytest
import torch
import transfer_suite
from cachekit import BY_NAME, LAYOUTS
from transfer_suite import *  # noqa: F403

from lmcache_kernels.errors import LayoutError
from lmcache_kernels.transfer.sharing.wrapping import wrap_one_kv_cache

PADDED = {"padded_blocks", "sliced_heads", "padded_dim"}


@pytest.fixture(scope="module")
def device():
    return "cpu"


@pytest.fixture(scope="module")
def mode():
    return "lmcache_driven"


@pytest.fixture(autouse=True)
def caches_in_shared_memory(monkeypatch):
    """The kit looks at the memory around a cache: let it be shared from the start, too."""

    def make_cache(*arguments, **options):
        cache = cachekit.make_cache(*arguments, **options)
        for tensor in (*cache.storages, *cache.tensors):
            wrap_one_kv_cache(tensor)
        return cache

    monkeypatch.setattr(transfer_suite, "make_cache", make_cache)


@pytest.mark.parametrize(
    "layout", [one for one in LAYOUTS if one.name not in PADDED], ids=lambda layout: layout.name
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_mp_075_every_layout_comes_back_bit_exact_in_other_blocks(layout, dtype, device, connected):
    transfer_suite.test_mp_075_every_layout_comes_back_bit_exact_in_other_blocks(
        layout, dtype, device, connected
    )


@pytest.mark.parametrize("name", sorted(PADDED))
def test_tensors_with_gaps_cannot_be_moved_to_shared_memory(name, connected):
    cache = cachekit.make_cache(BY_NAME[name])
    with pytest.raises(LayoutError, match="dense"):
        connected([transfer_suite.group_of(cache.tensors, cache.axes)])
