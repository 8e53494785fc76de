"""Who a worker is among those of its engine: which slice of the KV cache it holds, and for whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_kernels.errors import ConfigError
from lmcache_kernels.transfer.keys import shard_id

if TYPE_CHECKING:
    from lmcache_kernels.chunk_layout import ChunkLayout


@dataclass(frozen=True, slots=True)
class Slice:
    """One worker's part of the model's KV cache.

    Attributes:
        index, count: slice of the KV heads; ranks that hold the same heads have the same index.
        stage, stages: pipeline stage.
        writer: the one rank of those with the same slice that stores it.
    """

    index: int
    count: int
    stage: int
    stages: int
    writer: bool

    def shard(self, layout: ChunkLayout) -> bytes:
        return shard_id(
            layout.fingerprint,
            index=self.index,
            count=self.count,
            stage=self.stage,
            stages=self.stages,
        )


def slice_of(
    *, tp_rank: int, tp_size: int, pp_rank: int, pp_size: int, total_kv_heads: int, mla: bool
) -> Slice:
    """The slice of one rank.

    With more ranks than KV heads, consecutive ranks hold copies of one head; with MLA every rank
    holds the whole cache.

    Raises:
        ConfigError: heads and ranks of which neither divides the other.
    """
    heads = 1 if mla else total_kv_heads
    if heads < 1 or (heads % tp_size and tp_size % heads):
        raise ConfigError(
            f"{heads} KV heads on {tp_size} tensor-parallel ranks: expected one number to divide "
            "the other"
        )
    copies = max(1, tp_size // heads)
    return Slice(
        index=tp_rank // copies,
        count=tp_size // copies,
        stage=pp_rank,
        stages=pp_size,
        writer=tp_rank % copies == 0,
    )


def slice_of_engine(vllm_config: Any, rank: int) -> Slice:
    """The slice of an engine's worker ``rank`` (tensor parallel fastest).

    Raises:
        ConfigError: context parallelism, which splits blocks among ranks.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name}={getattr(parallel, name)}: this connector needs 1")
    model = vllm_config.model_config
    return slice_of(
        tp_rank=rank % parallel.tensor_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        pp_rank=rank // parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        total_kv_heads=model.get_total_num_kv_heads(),
        mla=bool(model.use_mla),
    )


def model_name(vllm_config: Any) -> str:
    """The name of the weights, with their revision when one was asked for."""
    model = vllm_config.model_config
    return f"{model.model}@{model.revision}" if model.revision else str(model.model)


def kv_dtype(vllm_config: Any) -> str:
    """The dtype of the cache, ``auto`` resolved to the model's."""
    dtype = str(vllm_config.cache_config.cache_dtype)
    return str(vllm_config.model_config.dtype) if dtype == "auto" else dtype
