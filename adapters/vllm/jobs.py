"""What the scheduler's half of the connector tells the workers' halves, and what it hears back.

Plain data, so that both halves can be tested without an engine. The engine carries it between
processes in its own metadata classes (see ``connector``).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Store these chunks once the step that computes them has run. ``block_ids``: per group, no more
    and no fewer than those of the chunks."""

    job_id: int
    digests: list[bytes]
    block_ids: list[list[int]]
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Load these chunks before (``synchronous``) or between steps. ``block_ids``: per group.

    The first ``skip_tokens`` tokens are in the cache already and other requests may be reading
    their blocks. An empty list of digests is a load that has failed before it began.
    """

    job_id: int
    request_id: str
    digests: list[bytes]
    block_ids: list[list[int]]
    skip_tokens: int
    synchronous: bool


@dataclass(slots=True)
class StepJobs:
    """One step's orders to every worker."""

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    # Stores whose blocks this step may overwrite: their gathers must be over before it runs.
    fence: list[int] = field(default_factory=list)
    decoding: bool = False  # some requests are behind their prompt


@dataclass(slots=True)
class StepReport:
    """Jobs that ended since the last report, summed over workers by :meth:`merge`."""

    over: dict[int, int] = field(default_factory=dict)  # job id -> workers
    failed: set[int] = field(default_factory=set)  # ids of loads that failed on some worker

    def __bool__(self) -> bool:
        return bool(self.over or self.failed)

    def merge(self, other: StepReport) -> StepReport:
        over = dict(self.over)
        for job_id, workers in other.over.items():
            over[job_id] = over.get(job_id, 0) + workers
        return StepReport(over, self.failed | other.failed)
