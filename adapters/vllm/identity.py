"""Who a worker is among those of its engine: which slice of the KV cache it holds, and for whom."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from lmcache_kernels.errors import ConfigError
from lmcache_kernels.transfer.cache_forms import ShardPart

if TYPE_CHECKING:
    from collections.abc import Sequence

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


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

    def part(self, layers: Sequence[Sequence[str]]) -> ShardPart:
        """What names this slice; ``layers``: per group, names in the order of the rows."""
        return ShardPart(
            index=self.index,
            count=self.count,
            stage=self.stage,
            stages=self.stages,
            layers=tuple(tuple(group) for group in layers),
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


def model_identity(vllm_config: Any, name: str | None = None) -> str:
    """A digest of everything that decides the KV of a token sequence: equal for equal models.

    The configuration goes in as the engine uses it, overrides included. For weights in a local
    folder their sizes and times do too, so that a checkpoint written anew is another model.

    Args:
        vllm_config: the engine's.
        name: replaces the weights' name, revision and files, for a model that lies elsewhere on
            another machine; the configuration still counts.
    """
    model = vllm_config.model_config
    settings = model.hf_text_config.to_dict()
    for volatile in ("_name_or_path", "transformers_version"):
        settings.pop(volatile, None)
    weights = (
        [name] if name else [str(model.model), str(model.revision or ""), *_files(model.model)]
    )
    meaning = [weights, settings, str(model.quantization or ""), _dtype_name(model.dtype)]
    return blake3(json.dumps(meaning, sort_keys=True, default=str).encode()).hexdigest()


def _files(folder: str) -> list[str]:
    """Name, size and time of the weight files of a local model; nothing for a name on a hub."""
    path = Path(folder)
    if not path.is_dir():
        return []
    found = []
    for file in sorted(path.iterdir()):
        if file.suffix in WEIGHT_SUFFIXES:
            stat = file.stat()
            found.append(f"{file.name} {stat.st_size} {stat.st_mtime_ns}")
    return found


def kv_dtype(vllm_config: Any) -> str:
    """The dtype of the cache by one name: ``auto`` is the model's, and aliases are resolved."""
    dtype = str(vllm_config.cache_config.cache_dtype)
    if dtype == "auto":
        return _dtype_name(vllm_config.model_config.dtype)
    return {"fp8": "fp8_e4m3"}.get(dtype, dtype)


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
