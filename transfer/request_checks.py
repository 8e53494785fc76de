"""What is checked of a request's fields before a cache acts on it. Pure."""

from __future__ import annotations

from .messages import DIGEST_BYTES, MAX_CHUNKS, MAX_NAME, split_digests

INSTANCE_LIMIT = 1 << 63
"""Instance ids are signed 64-bit integers and not negative."""


class RefusedError(Exception):
    """A request that is answered with an error reply of ``code``; never leaves the service."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def check_instance(instance: int) -> None:
    if not 0 <= instance < INSTANCE_LIMIT:
        raise RefusedError("bad_request", f"instance: expected 0 <= id < 2**63, got {instance}")


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


def check_name(name: str) -> None:
    if len(name) > MAX_NAME:
        raise RefusedError(
            "bad_request", f"request id: expected <= {MAX_NAME} characters, got {len(name)}"
        )


def checked_digests(packed: bytes) -> list[bytes]:
    if len(packed) % DIGEST_BYTES or len(packed) > MAX_CHUNKS * DIGEST_BYTES:
        raise RefusedError(
            "bad_request",
            f"digests: expected {DIGEST_BYTES} bytes for each of <= {MAX_CHUNKS} chunks, got "
            f"{len(packed)} bytes",
        )
    return split_digests(packed)
