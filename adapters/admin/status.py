"""A snapshot as JSON, for people and for ``lmcache-kernels top``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lmcache_kernels import __version__

if TYPE_CHECKING:
    from .snapshot import Snapshot, TierState


def status_of(snapshot: Snapshot, phase: str) -> dict[str, Any]:
    """Counters are since the start, durations in seconds, ratios None while nothing was asked."""
    stats = snapshot.stats
    return {
        "version": __version__,
        "incarnation": snapshot.incarnation,
        "phase": phase,
        "uptime_seconds": snapshot.uptime,
        "chunk_tokens": snapshot.chunk_tokens,
        "lookups": {
            "answered": stats["lookups"],
            "tokens": stats["asked"] * snapshot.chunk_tokens,
            "hit_tokens": snapshot.chunk_tokens * sum(tier.hit_chunks for tier in snapshot.tiers),
            "hit_ratio": _ratio(sum(tier.hit_chunks for tier in snapshot.tiers), stats["asked"]),
        },
        "tiers": [_tier(tier, snapshot) for tier in snapshot.tiers],
        "stores": _transfers(stats, "stores", "stored"),
        "loads": _transfers(stats, "loads", "loaded"),
        "evicted": {"chunks": stats["evicted"], "bytes": stats["evicted_bytes"]},
        "lost_chunks": {name: stats[name] for name in ("cleared", "discarded", "damaged")},
        "pins": {"count": stats["pins"], "bytes": stats["pinned_bytes"]},
        "quotas": {tenant: use._asdict() for tenant, use in snapshot.quotas.items()},
        "under_way": {
            "leases": stats["leases"],
            "stores": stats["writes"],
            "loads": stats["reads"],
            "requests_waiting": snapshot.waiting,
            "tier_lookups": stats["waiting_lookups"],
            "tier_stores": stats["waiting_stores"],
        },
        "workers": [
            {
                "instance": worker.instance,
                "shard": worker.shard.hex(),
                "chunk_bytes": worker.chunk_bytes,
                "last_seen_seconds": worker.silent_seconds,
                "pinged": worker.pinged,
                "copies": "server" if worker.server_copies else "worker",
            }
            for worker in snapshot.workers
        ],
        "workers_lost": stats["workers_lost"],
        "requests": {
            served.operation: {"outcomes": served.outcomes, "seconds": served.seconds}
            for served in snapshot.served
        },
        "slowest": [
            {
                "operation": slow.operation,
                "outcome": slow.outcome,
                "seconds": slow.seconds,
                "chunks": slow.chunks,
                "instance": slow.instance,
                "seconds_ago": snapshot.now - slow.ended_at,
            }
            for slow in snapshot.slowest
        ],
        "loop": {
            "busy_seconds": snapshot.busy_seconds,
            "delay_seconds": snapshot.delay,
            "malformed_messages": snapshot.malformed,
            "replies_undelivered": snapshot.undelivered,
        },
    }


def _tier(tier: TierState, snapshot: Snapshot) -> dict[str, Any]:
    told = asdict(tier)
    told["tier"] = told.pop("name")
    told["hit_tokens"] = told.pop("hit_chunks") * snapshot.chunk_tokens
    told["hit_ratio"] = _ratio(tier.hit_chunks, snapshot.stats["asked"])
    return told


def _transfers(stats: dict[str, int], what: str, moved: str) -> dict[str, Any]:
    return {
        "ok": stats[what],
        "chunks": stats[moved],
        "bytes": stats[f"{moved}_bytes"],
        "failed": {
            key.removeprefix(f"{what}_"): count
            for key, count in stats.items()
            if key.startswith(f"{what}_")
        },
    }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
