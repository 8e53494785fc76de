"""What is checked of a request's fields before a cache acts on it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_kernels.transfer.cache_forms import MAX_PARTS, MAX_ROWS
from lmcache_kernels.transfer.messages import (
    DIGEST_BYTES,
    MAX_CHUNKS,
    MAX_NAME,
    MAX_PIN_SECONDS,
    MAX_TENANT,
    MAX_TRANSFERS,
    is_tenant,
    split_digests,
)
from lmcache_kernels.transfer.sharing.descriptors import MAX_TENSORS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_kernels.transfer.messages import RegisterCache

INSTANCE_LIMIT = 1 << 63
"""Ids of instances and of transfers are signed 64-bit integers and not negative."""

MAX_PROGRAMS = 1 << 16
"""More than any GPU runs at a time."""


class RefusedError(Exception):
    """A request that is answered with an error reply of ``code``; never leaves the service."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def check_instance(instance: int) -> None:
    if not 0 <= instance < INSTANCE_LIMIT:
        raise RefusedError("bad_request", f"instance: expected 0 <= id < 2**63, got {instance}")


def check_transfers(transfers: Sequence[int]) -> None:
    """Ids of transfers."""
    if len(transfers) > MAX_TRANSFERS:
        raise RefusedError(
            "bad_request", f"transfers: expected <= {MAX_TRANSFERS}, got {len(transfers)}"
        )
    for transfer in transfers:
        if not 0 <= transfer < INSTANCE_LIMIT:
            raise RefusedError("bad_request", f"transfer: expected 0 <= id < 2**63, got {transfer}")


def check_cache(request: RegisterCache) -> None:
    """The bounds of a cache as a whole; its parts were checked when they were decoded."""
    pieces = [piece for group in request.groups for piece in group]
    programs = request.max_programs
    for what, count, least, most in (
        ("groups", len(request.groups), 1, MAX_PARTS),
        ("pieces", len(pieces), len(request.groups), MAX_PARTS),
        ("tensors", sum(len(piece.tensors) for piece in pieces), 1, MAX_TENSORS),
        ("rows", sum(piece.rows for piece in pieces), 1, MAX_ROWS),
        ("max_programs", 1 if programs is None else programs, 1, MAX_PROGRAMS),
    ):
        if not least <= count <= most:
            raise RefusedError("bad_request", f"{what}: expected {least} to {most}, got {count}")


def check_chunk_bytes(nbytes: int) -> None:
    if nbytes < 1:
        raise RefusedError("bad_request", f"chunk_bytes: expected >= 1, got {nbytes}")


def check_shard(shard: bytes) -> None:
    if len(shard) != DIGEST_BYTES:
        raise RefusedError("bad_request", f"shard: expected {DIGEST_BYTES} bytes, got {len(shard)}")


def unique_shards(shards: list[bytes]) -> list[bytes]:
    if not shards:
        raise RefusedError("bad_request", "shards: expected at least one, got none")
    for shard in shards:
        check_shard(shard)
    return list(dict.fromkeys(shards))


def unique_needs(shards: list[bytes], windows: list[int]) -> tuple[list[bytes], list[int]]:
    """Shards and their windows, no pair twice; no windows where there were none."""
    if not windows:
        return unique_shards(shards), []
    unique_shards(shards)
    if len(windows) != len(shards):
        raise RefusedError(
            "bad_request",
            f"windows: expected one for each of {len(shards)} shards, got {len(windows)}",
        )
    if not (min(windows) >= 0 and max(windows) <= MAX_CHUNKS):
        raise RefusedError(
            "bad_request",
            f"windows: expected 0 <= chunks <= {MAX_CHUNKS}, got {min(windows)} to {max(windows)}",
        )
    needs = dict.fromkeys(zip(shards, windows, strict=True))
    return [shard for shard, _ in needs], [window for _, window in needs]


def check_name(name: str, what: str = "request id") -> None:
    if len(name) > MAX_NAME:
        raise RefusedError(
            "bad_request", f"{what}: expected <= {MAX_NAME} characters, got {len(name)}"
        )


def check_tenant(tenant: str) -> None:
    if not is_tenant(tenant):
        raise RefusedError(
            "bad_request",
            f"tenant: expected <= {MAX_TENANT} printable characters without @ / \\, got "
            f"{tenant[: MAX_TENANT + 1]!r}",
        )


def check_pin_seconds(seconds: float) -> None:
    if not 0 < seconds <= MAX_PIN_SECONDS:
        raise RefusedError(
            "bad_request", f"pin: expected 0 < seconds <= {MAX_PIN_SECONDS:g}, got {seconds}"
        )


def checked_digests(packed: bytes) -> list[bytes]:
    if len(packed) % DIGEST_BYTES or len(packed) > MAX_CHUNKS * DIGEST_BYTES:
        raise RefusedError(
            "bad_request",
            f"digests: expected {DIGEST_BYTES} bytes for each of <= {MAX_CHUNKS} chunks, got "
            f"{len(packed)} bytes",
        )
    return split_digests(packed)
