"""The names of chunks: equal exactly when the bytes of the KV cache are.

A chunk's digest chains over everything its attention state depends on: the model, the adapter, the
salt, all tokens before it and its own, and the multimodal items among them. A shard id says which
slice of the model's cache, in which canonical form. Both are full blake3 digests over unambiguous
encodings, so they are the same in every process on every machine. Pure.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from lmcache_kernels.errors import ConfigError, LayoutError

from .arguments import integer

if TYPE_CHECKING:
    from collections.abc import Sequence

KEY_VERSION = 1
"""Raised by one whenever the encoding below changes."""


@dataclass(frozen=True, slots=True)
class Span:
    """A multimodal item: ``identifier`` names its content, tokens [start, start + length) hold it."""

    identifier: str
    start: int
    length: int


def root_digest(
    *, model: str, chunk_tokens: int, adapter: str = "", salt: str = "", dtype: str = ""
) -> bytes:
    """The digest before the first chunk: everything that holds for a whole request.

    Args:
        model: name of the weights.
        chunk_tokens: tokens of one chunk.
        adapter: LoRA adapter, by a name that is unique to its weights; empty for none.
        salt: isolates users from one another; empty for none.
        dtype: of the cache, as the engine was told (``auto`` resolved).

    Raises:
        ConfigError: ``chunk_tokens`` that is no integer above 0.
    """
    chunk_tokens = integer("chunk_tokens", chunk_tokens, 1)
    return _hash(
        ["lmcache-kernels request", KEY_VERSION, model, chunk_tokens, adapter, salt, dtype]
    )


def shard_id(
    fingerprint: bytes,
    *,
    index: int,
    count: int,
    stage: int = 0,
    stages: int = 1,
    layers: Sequence[Sequence[str]] = (),
) -> bytes:
    """The id of a slice of the cache.

    Args:
        fingerprint: of the canonical chunk.
        index, count: which of how many slices of the KV heads; a cache that every tensor-parallel
            rank holds whole (MLA) is slice 0 of 1 on all of them.
        stage, stages: which of how many pipeline stages.
        layers: names of the layers of each group in the order of their rows, so that engines that
            group or order the layers of a model differently never mix them up.

    Raises:
        ConfigError: an index that is not below its count.
    """
    for name, value, limit in (("index", index, count), ("stage", stage, stages)):
        if not 0 <= value < limit:
            raise ConfigError(f"shard {name}: expected 0 <= {name} < {limit}, got {value}")
    return _hash(
        [
            "lmcache-kernels shard",
            KEY_VERSION,
            fingerprint,
            [index, count, stage, stages],
            [list(group) for group in layers],
        ]
    )


class ChunkChain:
    """The digests of the chunks of one token sequence, extended as it grows.

    Args:
        root: from :func:`root_digest`, made with the same ``chunk_tokens``.
        chunk_tokens: tokens of one chunk; only whole chunks get a digest.
        spans: multimodal items anywhere in the sequence.

    Raises:
        ConfigError: ``chunk_tokens`` that is no integer above 0.
    """

    def __init__(self, root: bytes, chunk_tokens: int, spans: Sequence[Span] = ()) -> None:
        self._chunk_tokens = integer("chunk_tokens", chunk_tokens, 1)
        self._spans = tuple(spans)
        self._last = root
        self.digests: list[bytes] = []

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """Hash the whole chunks of ``tokens`` that were not hashed before; return all digests.

        ``tokens`` is the sequence from its start; the part hashed before must not have changed.

        Raises:
            LayoutError: a token id below 0 or not below 2**32.
        """
        size = self._chunk_tokens
        for start in range(len(self.digests) * size, len(tokens) - size + 1, size):
            extra = [
                [span.identifier, span.start - start, span.length]
                for span in self._spans
                if span.start < start + size and span.start + span.length > start
            ]
            hasher = blake3(self._last)
            hasher.update(_pack_tokens(tokens[start : start + size]))
            if extra:
                hasher.update(msgspec.msgpack.encode(extra))
            self._last = hasher.digest()
            self.digests.append(self._last)
        return self.digests


def _pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids are hashed as 32-bit unsigned little-endian integers."""
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise LayoutError(f"token ids: expected integers in [0, 2**32): {error}") from error
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def _hash(parts: list[object]) -> bytes:
    return blake3(msgspec.msgpack.encode(parts)).digest()
