"""Copies between host memory and a GPU that no kernel could do are refused by name, before anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lmcache_kernels import LayoutError, copy_blocks
from lmcache_kernels.views import plane_of


@pytest.mark.parametrize("pageable", ["dst", "src"])
def test_fault_f06_pageable_memory_is_refused_with_the_name_of_its_side(pageable: str) -> None:
    """A CPU tensor where the other side is a GPU's: our error and not a compiler's; nothing moves."""
    here, there = torch.full((2, 4, 4, 8), 1.0), torch.full((2, 4, 4, 8), 2.0)
    axes = "kv block token dim"
    planes = {"dst": plane_of(here, axes), "src": plane_of(there, axes)}
    gpu = "src" if pageable == "dst" else "dst"
    planes[gpu] = replace(planes[gpu], device="cuda:0")
    name = {"dst": "destination", "src": "source"}
    with pytest.raises(LayoutError, match=f"{name[pageable]} on cpu.*stage one of them"):
        copy_blocks(planes["dst"], [0], planes["src"], [1])
    with pytest.raises(LayoutError, match=f"{name[gpu]} on cuda:0"):
        copy_blocks(planes["dst"], [0], planes["src"], [1])
    assert here.eq(1.0).all()
