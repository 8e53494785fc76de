"""Random descriptions of caches, all of them valid."""

from __future__ import annotations

from hypothesis import strategies as st

from lmcache_kernels.transfer.cache_forms import (
    ArraysForm,
    AxesForm,
    PagesForm,
    ShardPart,
    SharedPiece,
)
from lmcache_kernels.transfer.sharing.descriptors import CpuShare, CudaShare, TensorDescriptor

CUDA_UUID = "01234567-89ab-cdef-0123-456789abcdef"


def tensor(shape=(2, 4, 8), dtype="uint8", share=None):
    """A dense one, in a segment of its own."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= extent
    share = share or CpuShare(segment="lmcache_kernels_0", nbytes=step * 8, offset=0)
    return TensorDescriptor(
        version=1, share=share, dtype=dtype, shape=tuple(shape), strides=tuple(strides)
    )


def piece(form=None, tensors=None, lists=()):
    return SharedPiece(
        tensors=tensors or (tensor(),), lists=lists, form=form or AxesForm(axes="block token dim")
    )


SHARES = st.sampled_from(
    [
        CpuShare(segment="lmcache_kernels_1", nbytes=4096, offset=64),
        CudaShare(handle=bytes(range(64)), device=CUDA_UUID, nbytes=4096, offset=512),
    ]
)
FORMS = st.one_of(
    st.just(AxesForm(axes="block token dim")),
    st.just(AxesForm(axes="block (token head) dim", sizes={"head": 2}, tokens_per_state=4)),
    st.builds(PagesForm, block_tokens=st.integers(1, 64), format=st.text("abc", min_size=1)),
    st.builds(
        ArraysForm,
        block_tokens=st.integers(1, 64),
        widths=st.lists(st.integers(1, 64), max_size=3).map(tuple),
    ),
)
PIECES = st.builds(
    lambda share, form, count: SharedPiece(
        tensors=(tensor(share=share),) * count, lists=(count,), form=form
    ),
    SHARES,
    FORMS,
    st.integers(1, 3),
)
GROUPS = st.lists(st.lists(PIECES, max_size=2).map(tuple), max_size=3)
PARTS = st.builds(
    ShardPart,
    index=st.integers(0, 3),
    count=st.integers(1, 4),
    layers=st.lists(st.lists(st.text("abc.0", min_size=1), max_size=2).map(tuple), max_size=2).map(
        tuple
    ),
)
