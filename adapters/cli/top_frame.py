"""What ``lmcache-kernels top`` shows, made of two readings of a server's status. Fits 80 x 24."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from .polling import Status, Tier, Transfers

BAR = 16
WIDE = 128
"""Columns from which on workers and slow requests stand side by side."""

FULL = 0.9
"""Used part of a tier that is shown in another colour; a full cache is no fault."""

SILENT = 30.0
"""Seconds after which a worker is shown in another colour: three pings have not come."""

HEADER = "bold white on grey30"


@dataclass(frozen=True)
class Frame:
    """One picture.

    Attributes:
        url: of the server.
        now: its status, as it was read last; None: it was never there.
        before: an earlier one of the same life of the server; None: shows averages since its start.
        away: why it does not answer now.
        height: lines that there are; None: as many as it takes.
    """

    url: str
    now: Status | None
    before: Status | None = None
    away: str | None = None
    height: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head: list[RenderableType] = [_header(self.url, self.now, self.away)]
        if self.now is None:
            yield Group(*head)
            return
        rates = _Rates(self.now, self.before or self.now.at_start())
        head += ["", _tiers(self.now, rates), "", _traffic(self.now, rates), ""]
        wide = options.max_width >= WIDE
        taken = 12 + len(self.now.tiers) + (0 if wide else 2)  # the last line is the terminal's
        rows = 1000 if self.height is None else max(2, self.height - taken)
        few = rows if wide else max(1, min(len(self.now.workers), rows // 2))
        workers = _workers(self.now, few)
        slowest = _slowest(self.now, rows if wide else max(1, rows - few))
        if wide:
            both = Table.grid(expand=True, padding=(0, 2))
            both.add_column(ratio=1)
            both.add_column(ratio=1)
            both.add_row(workers, slowest)
            yield Group(*head, both)
        else:
            yield Group(*head, workers, "", slowest)


class _Rates:
    """What happened between two readings, by the server's own clock."""

    def __init__(self, now: Status, before: Status) -> None:
        self.seconds = max(now.uptime_seconds - before.uptime_seconds, 1e-9)
        self.since_start = not before.uptime_seconds
        self._now, self._before = now, before
        self.tokens = now.lookups.tokens - before.lookups.tokens
        self.hit_tokens = now.lookups.hit_tokens - before.lookups.hit_tokens
        self.lookups = (now.lookups.answered - before.lookups.answered) / self.seconds
        self.evicted = (now.evicted.chunks - before.evicted.chunks) / self.seconds
        self.busy = (now.loop.busy_seconds - before.loop.busy_seconds) / self.seconds
        self.requests = (_answered(now) - _answered(before)) / self.seconds
        self.errors = (_refused(now) - _refused(before)) / self.seconds

    def hit_of(self, tier: Tier) -> str:
        before = {one.tier: one.hit_tokens for one in self._before.tiers}
        return _percent(tier.hit_tokens - before.get(tier.tier, 0), self.tokens)

    def of(self, now: Transfers, before: Transfers) -> tuple[str, str, str]:
        """Bytes, transfers and failures a second."""
        failed = sum(now.failed.values()) - sum(before.failed.values())
        return (
            f"{(now.bytes - before.bytes) / self.seconds / 1e9:.3f} GB/s",
            f"{_number((now.ok - before.ok) / self.seconds)}/s",
            f"{_number(failed / self.seconds)}/s",
        )

    @property
    def stores(self) -> tuple[str, str, str]:
        return self.of(self._now.stores, self._before.stores)

    @property
    def loads(self) -> tuple[str, str, str]:
        return self.of(self._now.loads, self._before.loads)


def _header(url: str, now: Status | None, away: str | None) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(" lmcache-kernels ", style="bold reverse")
    line.append(f" {url}  ")
    if away is not None:
        line.append(f"AWAY, trying again: {away}", style="bold red")
    elif now is not None:
        good = now.phase == "serving"
        line.append(now.phase, style="bold green" if good else "bold yellow")
        line.append(f"  up {_time(now.uptime_seconds)}  {now.chunk_tokens} tokens a chunk")
        line.append(f"  {now.version}", style="dim")
    return line


def _tiers(now: Status, rates: _Rates) -> Table:
    over = "since start" if rates.since_start else f"in {_time(rates.seconds)}"
    table = _table("tier", "used", ">of", ">chunks", f">hits {over}", ">hits in all", "")
    for tier in now.tiers:
        away = bool(tier.details.get("away"))
        table.add_row(
            Text(tier.tier, style="red" if away else "cyan"),
            Text("away", style="bold red") if away else _bar(tier.used_bytes, tier.capacity_bytes),
            _used(tier),
            "-" if tier.chunks is None else _number(tier.chunks),
            rates.hit_of(tier),
            _percent(tier.hit_tokens, now.lookups.tokens),
        )
    return table


def _traffic(now: Status, rates: _Rates) -> Table:
    table = _table("", ">throughput", ">ok", ">failed", "", "")
    hits = _percent(rates.hit_tokens, rates.tokens)
    total = _percent(now.lookups.hit_tokens, now.lookups.tokens)
    under = now.under_way
    busy = f"{rates.busy:.0%}, evicts {_number(rates.evicted)}/s"
    for row in (
        ("store", *rates.stores, "hit ratio", f"{hits} (in all {total})"),
        ("load", *rates.loads, "leases", _number(under.leases)),
        (
            *("lookup", "", f"{_number(rates.lookups)}/s", "", "under way"),
            f"{under.stores} st, {under.loads} ld, {under.requests_waiting} wait",
        ),
        ("request", "", f"{_number(rates.requests)}/s", f"{_number(rates.errors)}/s", "busy", busy),
    ):
        table.add_row(*row)
    return table


def _workers(now: Status, rows: int) -> Table:
    count = len(now.workers)
    title = f"{count} workers" if count <= rows else f"{rows} of {count} workers"
    table = _table(f">{title}", "shard", "copies by", ">last seen", "")
    for worker in sorted(now.workers, key=lambda one: -one.last_seen_seconds)[:rows]:
        silent = worker.last_seen_seconds
        table.add_row(
            str(worker.instance),
            worker.shard[:12],
            worker.copies,
            Text(f"{_time(silent)} ago", style="yellow" if silent > SILENT else ""),
        )
    return table


def _slowest(now: Status, rows: int) -> Table:
    table = _table("slowest requests", ">took", ">chunks", ">when", "outcome", "")
    for slow in now.slowest[:rows]:
        table.add_row(
            slow.operation,
            _time(slow.seconds),
            str(slow.chunks or ""),
            f"{_time(slow.seconds_ago)} ago",
            Text(slow.outcome, style="" if slow.outcome == "ok" else "red"),
        )
    return table


def _table(*columns: str) -> Table:
    """With these columns, to the right where ``>`` stands before the title; the last one takes what is
    left of the width."""
    table = Table(box=None, expand=True, pad_edge=False, padding=(0, 2, 0, 0), header_style=HEADER)
    for index, column in enumerate(columns):
        table.add_column(
            column.removeprefix(">"),
            justify="right" if column.startswith(">") else "left",
            ratio=1 if index == len(columns) - 1 else None,
            no_wrap=True,
        )
    return table


def _bar(used: int | None, capacity: int | None) -> RenderableType:
    if used is None or not capacity:
        return ""
    full = min(1.0, used / capacity)
    filled = round(full * BAR)
    bar = Text("█" * filled, style="green" if full < FULL else "yellow")
    return bar.append("░" * (BAR - filled), style="dim")


def _used(tier: Tier) -> str:
    if tier.used_bytes is None:
        return "-"
    used = f"{tier.used_bytes / 2**30:.2f}"
    return (
        f"{used} GiB"
        if not tier.capacity_bytes
        else f"{used}/{tier.capacity_bytes / 2**30:.2f} GiB"
    )


def _answered(status: Status) -> int:
    return sum(sum(operation.outcomes.values()) for operation in status.requests.values())


def _refused(status: Status) -> int:
    return _answered(status) - sum(
        operation.outcomes.get("ok", 0) for operation in status.requests.values()
    )


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole > 0 else "-"


def _number(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.1f}{unit}"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _time(seconds: float) -> str:
    """``15 us`` to ``3 d 4 h``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, days = minutes // 60, minutes // 1440
    return f"{hours} h {minutes % 60} min" if days < 2 else f"{days} d {hours % 24} h"
