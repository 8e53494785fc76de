"""vLLM's KV caches as data: which axes a registered tensor has, and which pages only move whole."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from lmcache_kernels.errors import LayoutError
from lmcache_kernels.transfer.kv_groups import KVGroup

from .tracker import GroupShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from lmcache_kernels.plane import CacheGroup

LAYOUTS = (
    # vLLM >= 0.29: one logical order for every back end, K and V side by side; strides tell NHD
    # from HND.
    "block head token dim",
    # vLLM <= 0.28: FlashAttention; FlashInfer and Triton; MLA.
    "kv block token head dim",
    "block kv token head dim",
    "block token dim",
)
"""Axes of the tensors that attention layers register, tried against what the spec says they hold."""

INDEXER_WIDTHS = (128, 4)
"""Bytes a token of the sparse-attention indexer (DeepSeek-V3.2): all values of a page, then its scales.
Such a page is registered as one array of 132 bytes a token, which it is not."""

SUPPORTED = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")
"""KV-cache specs whose blocks hold the keys and values of consecutive tokens."""


def group_shapes(kv_cache_config: Any) -> list[GroupShape]:
    """How each KV-cache group pages its tokens.

    Raises:
        LayoutError: a cache this connector cannot store, saying why.
    """
    if getattr(kv_cache_config, "needs_kv_cache_zeroing", False):
        raise LayoutError(
            "KV cache whose blocks are zeroed when they are handed out: that can come before a "
            "store has read them; run this model without this connector"
        )
    shapes = []
    for group in kv_cache_config.kv_cache_groups:
        specs = list(_layer_specs(group).values())
        if not specs:
            raise LayoutError("KV-cache group without layers on this pipeline stage: not supported")
        kinds = {type(spec).__name__ for spec in specs}
        if not kinds <= set(SUPPORTED):
            raise LayoutError(
                f"KV-cache group of {', '.join(sorted(kinds))}: this connector stores "
                f"{', '.join(SUPPORTED)} only; run this model without it"
            )
        # A full-attention spec may carry a window too, but its blocks are never freed early.
        windows = [s.sliding_window for s in specs if type(s).__name__ == "SlidingWindowSpec"]
        shapes.append(GroupShape(specs[0].block_size, min(windows, default=None)))
    if len({shape.block_tokens for shape in shapes}) > 1:
        raise LayoutError(
            f"KV-cache groups of {[shape.block_tokens for shape in shapes]} tokens a block: the "
            "engine copies parts of their blocks before a store has read them; run this model "
            "without this connector"
        )
    return shapes


def describe_groups(
    kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor], isa_of: Mapping[str, str]
) -> tuple[list[KVGroup], list[list[str]]]:
    """The engine's cache by group; per group also its layers in the order of their rows.

    Layers of one shape and stride share a plane, so the order of a chunk's rows can depend on how
    an engine laid its layers out, and belongs to the name of what is stored.

    Args:
        kv_cache_config: the engine's, with its groups and specs.
        kv_caches: the tensors the engine registered, by layer.
        isa_of: for layers of the CPU attention back end, the instruction set its page format
            depends on; pages of such layers are opaque.

    Raises:
        LayoutError: a tensor whose shape is none of :data:`LAYOUTS` for its spec, or a layer that
            was not registered.
    """
    described = [
        _describe(group, kv_cache_config.num_blocks, kv_caches, isa_of)
        for group in kv_cache_config.kv_cache_groups
    ]
    return [group for group, _ in described], [layers for _, layers in described]


def check_can_move(kv_caches: Mapping[str, torch.Tensor], bound: Mapping[str, object]) -> None:
    """Refuse tensors that attention layers would not follow when they move to shared memory.

    Args:
        kv_caches: the tensors the engine registered, by layer.
        bound: what the layers themselves compute with. A tensor object moves, and with it whoever
            has it, but no view of it.

    Raises:
        LayoutError: a tensor on the CPU of which a layer has a view only.
    """
    for name, tensor in kv_caches.items():
        if tensor.device.type == "cpu" and bound.get(name) is not tensor:
            raise LayoutError(
                f"layer {name}: it computes with a view of its KV cache, which cannot follow into "
                "the shared memory that lmcache.mp.mp_transfer_mode=lmcache_driven needs on a CPU; "
                "set it to engine_driven"
            )


def comes_by_layer(groups: Sequence[CacheGroup]) -> bool:
    """Whether rows tell layers apart: not where unlike layers of a group have planes of their own."""
    return all(len(group.planes) == 1 for group in groups)


def layers_run_once(vllm_config: Any) -> bool:
    """Whether a layer's hook, called once in a step, tells that its cache has all the step's tokens.

    Micro-batches call it for each, and a drafting model when it has seen some of them.
    """
    micro = getattr(vllm_config.parallel_config, "use_ubatching", False)
    return not micro and vllm_config.speculative_config is None


def _layer_specs(group: Any) -> dict[str, Any]:
    spec = group.kv_cache_spec
    per_layer = getattr(spec, "kv_cache_specs", None)
    return {name: per_layer[name] if per_layer else spec for name in group.layer_names}


def _describe(
    group: Any,
    num_blocks: int,
    kv_caches: Mapping[str, torch.Tensor],
    isa_of: Mapping[str, str],
) -> tuple[KVGroup, list[str]]:
    specs = _layer_specs(group)
    missing = [name for name in specs if name not in kv_caches]
    if missing:
        raise LayoutError(f"layers {', '.join(missing)}: expected their KV caches to be registered")
    first_name, first_spec = next(iter(specs.items()))
    if first_name in isa_of:
        tag = (
            f"vllm cpu_attn {platform.machine()} {isa_of[first_name]} "
            f"heads={first_spec.num_kv_heads} dim={first_spec.head_size}"
        )
        opaque = KVGroup.of_pages([kv_caches[name] for name in specs], first_spec.block_size, tag)
        if len(opaque.read().planes) > 1:  # the tag names one format
            raise LayoutError(
                f"layers {', '.join(specs)}: expected opaque pages that are all alike"
            )
        return opaque, list(specs)
    alike: dict[tuple[object, ...], list[str]] = {}
    pages = set()
    for name, spec in specs.items():
        tensor = kv_caches[name]
        axes = axes_of(tensor, spec, num_blocks)
        pages.add(tensor.shape[axes.split().index("block")] // num_blocks)
        axes = "" if _is_indexer(tensor) else axes
        alike.setdefault((axes, tensor.shape, tensor.stride(), tensor.dtype), []).append(name)
    if len(pages) > 1:
        raise LayoutError(
            f"layers {', '.join(specs)}: expected attention kernels that cut blocks alike, got "
            f"{sorted(pages)} pages a block"
        )
    # The smallest page is what planes describe; whoever has ids of blocks spells them out.
    page_tokens = first_spec.block_size // pages.pop()
    pieces = []
    for (layout, *_), names in alike.items():
        tensors = [kv_caches[name] for name in names]
        if layout:
            pieces.append(KVGroup.of(tensors, str(layout)))
        else:
            pieces.append(KVGroup.of_arrays(tensors, page_tokens, INDEXER_WIDTHS))
    return KVGroup.joined(pieces), [name for names in alike.values() for name in names]


def _is_indexer(tensor: torch.Tensor) -> bool:
    return tensor.element_size() == 1 and tensor.shape[-1] == sum(INDEXER_WIDTHS)


def axes_of(tensor: torch.Tensor, spec: Any, num_blocks: int) -> str:
    """Which of :data:`LAYOUTS` the tensor has, given what its spec says it holds.

    Raises:
        LayoutError: none or several of them, with shape and strides.
    """
    fitting = [axes for axes in LAYOUTS if _fits(tensor.shape, axes.split(), spec, num_blocks)]
    if len(fitting) != 1:
        raise LayoutError(
            f"KV cache of shape {tuple(tensor.shape)} stride {tensor.stride()}: expected one of "
            f"{list(LAYOUTS)} for {num_blocks} blocks of {spec.block_size} tokens, "
            f"{spec.num_kv_heads} heads of {spec.head_size}, or for pages that make such blocks; "
            f"{len(fitting)} fit"
        )
    return fitting[0]


def _fits(shape: Sequence[int], axes: list[str], spec: Any, num_blocks: int) -> bool:
    if len(shape) != len(axes):
        return False
    extent = dict(zip(axes, shape, strict=True))
    pages, rest = divmod(extent["block"], num_blocks)
    return (
        pages >= 1
        and rest == 0
        and extent["token"] * pages == spec.block_size
        and extent.get("kv", 2) == 2
        and extent.get("head", spec.num_kv_heads) == spec.num_kv_heads
    )
