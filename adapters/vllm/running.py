"""Which jobs some worker has not reported as over, and which blocks they touch. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .jobs import StepReport


@dataclass(slots=True)
class RunningJob:
    """A store or load. ``reads``: blocks a store reads. ``fills``: blocks a load fills in a step."""

    job_id: int
    request_id: str
    reads: frozenset[int]
    fills: frozenset[int]
    awaited: int
    failed: bool = False


class RunningJobs:
    """Numbers jobs and follows them until every one of ``workers`` has reported them."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._next = 0
        self._jobs: dict[int, RunningJob] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def start(
        self, request_id: str, *, reads: Iterable[int] = (), fills: Iterable[int] = ()
    ) -> int:
        """Follow a new job; returns its id."""
        job_id, self._next = self._next, self._next + 1
        self._jobs[job_id] = RunningJob(
            job_id, request_id, frozenset(reads), frozenset(fills), self._workers
        )
        return job_id

    def reading(self, blocks: Iterable[int]) -> list[int]:
        """Ids of the stores that read any of ``blocks``."""
        wanted = set(blocks)
        return [job.job_id for job in self._jobs.values() if not wanted.isdisjoint(job.reads)]

    def any_fills(self, tables: Sequence[Sequence[int]]) -> bool:
        """Is a load inside a step filling a block of any of ``tables``?"""
        return any(
            not job.fills.isdisjoint(blocks)
            for job in self._jobs.values()
            if job.fills
            for blocks in tables
        )

    def report(self, report: StepReport) -> list[RunningJob]:
        """Take in a report; returns the jobs that are over with it."""
        for job_id in report.failed:
            if job_id in self._jobs:
                self._jobs[job_id].failed = True
        ended = []
        for job_id, workers in report.over.items():
            job = self._jobs.get(job_id)
            if job is None:
                continue
            job.awaited -= workers
            if job.awaited <= 0:
                ended.append(self._jobs.pop(job_id))
        return ended
