"""What a server tells Prometheus: one table, read from one snapshot."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from lmcache_kernels import __version__
from lmcache_kernels.transfer.serving.request_log import BOUNDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lmcache_kernels.transfer.serving.request_log import Served

    from .snapshot import Snapshot

PREFIX = "lmcache_kernels_"

Samples: TypeAlias = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels, and the value."""


class Told(NamedTuple):
    """One metric: a counter if its name ends with ``_total``, else a gauge."""

    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[Snapshot], Samples]


def _stat(name: str, key: str, help_text: str) -> Told:
    return Told(name, help_text, (), lambda now: [((), now.stats[key])])


def _by(name: str, help_text: str, label: str, keys: dict[str, str]) -> Told:
    """``keys``: of the statistics, by the value of the label."""
    return Told(
        name,
        help_text,
        (label,),
        lambda now: [((value,), now.stats[key]) for value, key in keys.items()],
    )


def _below(name: str, key: str, help_text: str) -> Told:
    """Of each tier below the arena."""
    return Told(
        name,
        help_text,
        ("tier",),
        lambda now: [((tier.name,), tier.details[key]) for tier in now.tiers if tier.details],
    )


def _lookups(now: Snapshot) -> Samples:
    stats = now.stats
    known = {kind: stats[f"lookups_{kind}"] for kind in ("full", "partial", "empty")}
    yield from (((kind,), count) for kind, count in known.items())
    yield ("miss",), stats["lookups"] - sum(known.values())


def _workers(now: Snapshot) -> Samples:
    by_server = sum(worker.server_copies for worker in now.workers)
    return [(("server",), by_server), (("worker",), len(now.workers) - by_server)]


def _outcomes(now: Snapshot) -> Samples:
    return [
        ((served.operation, outcome), count)
        for served in now.served
        for outcome, count in served.outcomes.items()
    ]


METRICS: tuple[Told, ...] = (
    Told(
        "build_info",
        "Always 1; its labels say which release this is.",
        ("version", "python"),
        lambda now: [((__version__, platform.python_version()), 1)],
    ),
    Told("uptime_seconds", "Since the server started.", (), lambda now: [((), now.uptime)]),
    # lookups
    Told(
        "lookups_total",
        "Lookups answered, by how much of what they named was there: full, partial, miss, or empty for "
        "those that named nothing.",
        ("result",),
        _lookups,
    ),
    Told(
        "lookup_tokens_total",
        "Tokens that lookups named, in whole chunks.",
        (),
        lambda now: [((), now.stats["asked"] * now.chunk_tokens)],
    ),
    Told(
        "lookup_hit_tokens_total",
        "Tokens that lookups found, by the tier that had them; l1 is the arena.",
        ("tier",),
        lambda now: [((tier.name,), tier.hit_chunks * now.chunk_tokens) for tier in now.tiers],
    ),
    # stores and loads
    _stat("stores_total", "stores", "Stores that made chunks visible."),
    _by(
        "store_failures_total",
        "Stores that failed: the writer gave up (aborted), took too long (expired) or was lost (dropped), "
        "what it wrote was cleared meanwhile, or there was no room for all of it.",
        "reason",
        {
            reason: f"stores_{reason}"
            for reason in ("aborted", "expired", "dropped", "cleared", "no_room")
        },
    ),
    _stat("stored_chunks_total", "stored", "Chunks that stores made visible."),
    _stat("stored_bytes_total", "stored_bytes", "Bytes of their payloads."),
    _stat("loads_total", "loads", "Loads that read all that they were given."),
    _by(
        "load_failures_total",
        "Loads that failed: chunks were missing or damaged, the reader failed, took too long (expired) or "
        "was lost (dropped).",
        "reason",
        {
            reason: f"loads_{reason}"
            for reason in ("missing", "damaged", "failed", "expired", "dropped")
        },
    ),
    _stat(
        "loaded_chunks_total", "loaded", "Chunks that were read, those before a damaged one too."
    ),
    _stat("loaded_bytes_total", "loaded_bytes", "Bytes of their payloads."),
    # the arena
    _stat("evicted_chunks_total", "evicted", "Chunks that made room for others."),
    _stat("evicted_bytes_total", "evicted_bytes", "Bytes of their payloads."),
    _by(
        "lost_chunks_total",
        "Chunks that went without being evicted: cleared on request, discarded with the store that wrote "
        "them, found damaged.",
        "reason",
        {reason: reason for reason in ("cleared", "discarded", "damaged")},
    ),
    Told(
        "chunks",
        "Chunks in the arena: idle, held by leases or readers, or being written.",
        ("state",),
        lambda now: [
            (("idle",), now.stats["idle"]),
            (("held",), now.stats["resident"] - now.stats["idle"]),
            (("writing",), now.stats["writing"]),
        ],
    ),
    _stat("pins", "pins", "Pins that keep chunks."),
    _stat("pinned_bytes", "pinned_bytes", "Bytes of slots that pins keep."),
    Told(
        "tenant_used_bytes",
        "Bytes of slots that a tenant with a quota uses.",
        ("tenant",),
        lambda now: [((name,), use.used_bytes) for name, use in now.quotas.items()],
    ),
    Told(
        "tenant_quota_bytes",
        "Bytes of slots that a tenant may use.",
        ("tenant",),
        lambda now: [((name,), use.quota_bytes) for name, use in now.quotas.items()],
    ),
    Told(
        "tier_used_bytes",
        "Bytes used, headers included; of tiers that know it.",
        ("tier",),
        lambda now: [((t.name,), t.used_bytes) for t in now.tiers if t.used_bytes is not None],
    ),
    Told(
        "tier_capacity_bytes",
        "Bytes that may be used.",
        ("tier",),
        lambda now: [
            ((t.name,), t.capacity_bytes) for t in now.tiers if t.capacity_bytes is not None
        ],
    ),
    # tiers below the arena
    _below("tier_loaded_bytes_total", "loads_nbytes", "Bytes that came up, headers included."),
    _below("tier_stored_bytes_total", "stores_nbytes", "Bytes that went down, headers included."),
    _below("tier_load_seconds_total", "loads_seconds", "Seconds of all calls that load, added up."),
    _below(
        "tier_store_seconds_total", "stores_seconds", "Seconds of all calls that store, added up."
    ),
    _below("tier_load_failed_chunks_total", "loads_failed", "Chunks that should have come up."),
    _below("tier_store_failed_chunks_total", "stores_failed", "Chunks that should have gone down."),
    _below(
        "tier_skipped_chunks_total",
        "skipped",
        "Chunks that left the arena before their turn to go down.",
    ),
    _below("tier_failures_total", "failures", "Calls that failed as a whole."),
    _below("tier_away", "away", "1 while a tier cannot be used and counts as empty."),
    # under way
    _stat("leases", "leases", "Requests whose lookup keeps chunks in the arena."),
    _by(
        "transfers_under_way",
        "Stores and loads that have begun and are not over.",
        "direction",
        {"store": "writes", "load": "reads"},
    ),
    _by(
        "tier_queue",
        "What waits for tiers: lookups, and chunks to go down, once for each tier.",
        "what",
        {"lookups": "waiting_lookups", "chunks": "waiting_stores"},
    ),
    Told(
        "workers",
        "Registered workers, by who copies for them.",
        ("copies",),
        _workers,
    ),
    _stat("workers_lost_total", "workers_lost", "Workers dropped because they were silent."),
    # requests
    Told(
        "requests_total",
        "Requests answered, by operation and outcome: ok, or the code of the error.",
        ("operation", "outcome"),
        _outcomes,
    ),
    Told(
        "requests_waiting",
        "Requests whose reply comes later: copies that the server makes, lookups that wait for tiers.",
        (),
        lambda now: [((), now.waiting)],
    ),
    Told(
        "replies_undelivered_total",
        "Replies that their client could not or would not take.",
        (),
        lambda now: [((), now.undelivered)],
    ),
    Told(
        "malformed_messages_total",
        "Messages that were no request.",
        (),
        lambda now: [((), now.malformed)],
    ),
    Told(
        "loop_busy_seconds_total",
        "Seconds in which the server's thread had something to do; its rate is the share of a core.",
        (),
        lambda now: [((), now.busy_seconds)],
    ),
    Told(
        "loop_delay_seconds",
        "Seconds that this scrape waited until the server's thread had time for it.",
        (),
        lambda now: [((), now.delay)],
    ),
)
"""All of them but the durations of requests, which are a histogram."""

DURATIONS = "request_duration_seconds"
DURATIONS_HELP = "From reading a request to handing its reply on, by operation."


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """What Prometheus is told."""
    for told in METRICS:
        name = PREFIX + told.name
        counts = name.endswith("_total")
        family = (CounterMetricFamily if counts else GaugeMetricFamily)(
            name, told.help, labels=told.labels
        )
        for labels, value in told.read(snapshot):
            family.add_metric(labels, value)
        yield family
    durations = HistogramMetricFamily(PREFIX + DURATIONS, DURATIONS_HELP, labels=("operation",))
    for served in snapshot.served:
        durations.add_metric(
            (served.operation,), buckets=_buckets(served), sum_value=served.seconds
        )
    yield durations


def exposition(snapshot: Snapshot, accept: str) -> tuple[bytes, str]:
    """The body and the content type of a scrape, this process's memory, time and files included.

    Args:
        accept: the scraper's header of that name.
    """
    registry = CollectorRegistry()
    registry.register(_Once(snapshot))
    ProcessCollector(registry=registry)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Once:
    """A collector, as a registry wants one."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        return families(self._snapshot)


def _buckets(served: Served) -> list[tuple[str, float]]:
    limits = [*(repr(bound) for bound in BOUNDS), "+Inf"]
    return list(zip(limits, accumulate(served.buckets), strict=True))
