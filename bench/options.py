"""What a person chooses for a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Attributes:
    size_mb: least payload of a trial.
    rounds: timed runs of every contender.
    only: measure what has this in its title, in capitals or not.
    max_programs: bound on the kernels' grid, for benchmarks that do not choose it themselves.
    seconds: how long a load lasts.
    """

    size_mb: int = 256
    rounds: int = 15
    only: str | None = None
    max_programs: int | None = None
    seconds: float = 60.0

    def wants(self, title: str) -> bool:
        return not self.only or self.only.lower() in title.lower()
