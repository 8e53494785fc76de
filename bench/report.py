"""Results as one page that needs nothing else: plots, every figure in a table, the machine."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from .charts import COLOURS, Group, bar_chart, legend
from .results import OURS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .results import Document, Row

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --paper: #ffffff; --soft: #5c6570; --line: #d5dae0;
  --b0: #0b62c4; --b1: #8a929c; --b2: #c2540a; --b3: #7a4fb5; --b4: #0f7d6c; --b5: #b3266b; --b6: #7d6608; --b7: #3f7fa6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --paper: #15181c; --soft: #a3abb5; --line: #383e46;
  --b0: #62a8ff; --b1: #8b939d; --b2: #f29150; --b3: #b795ee; --b4: #45bfa8; --b5: #f07fb2; --b6: #cdb23f; --b7: #8cc4e6; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; } h3 { font-size: 1rem; }
p, dt { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; }
dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
caption { text-align: left; color: var(--soft); padding-bottom: .4rem; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th[scope=row], td.text { text-align: left; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; }
.swatch { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; }
.bad { font-weight: 700; }
svg { max-width: 100%; height: auto; } svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
svg .tick, svg .value { fill: var(--soft); } svg .grid { stroke: var(--line); }
""" + "\n".join(
    f"svg .b{n} {{ fill: var(--b{n}); }} .swatch.b{n} {{ background: var(--b{n}); }}"
    for n in range(COLOURS)
)


def render(documents: Sequence[Document]) -> str:
    """The whole page; it refers to nothing outside itself."""
    body = "\n".join(_section(document) for document in documents)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>lmcache-kernels benchmarks</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>lmcache-kernels benchmarks</h1>\n<p>{escape(GLOSSARY)}</p>\n{body}\n</body>\n</html>\n"
    )


ABOUT = {
    "kernels": "Blocks of a paged KV cache gathered into chunks of 256 tokens lying one behind the "
    "other, or scattered from them, inside GPU memory. The ceiling is a plain device copy of as many "
    "bytes. Caches are cold, ids random unless a row says contiguous, and every byte is compared "
    "before anything is timed.",
    "peer": "Blocks of one GPU copied to other blocks of another GPU over NVLink. Pushed: the source's "
    "GPU runs the kernel; pulled: the destination's. The ceiling is one peer copy of as many bytes. "
    "Heads a-b: only these heads of the source, which are all that the destination has.",
    "engine": "Whole chunks between a cache and pinned host memory, with checksums. Link: every layout, "
    "one way; the ceiling is one plain copy of 256 MiB. Two-way: both at once; the ceiling is two plain "
    "copies at once. Sustained: both without a pause for a while. Decode and gemm: how much longer a step of a loop takes while copies fill the link, "
    "and what was copied meanwhile. Latency: through a server process, from the call until the result. "
    "Submit: what handing over a store costs the engine's thread.",
    "sweep": "Tile shapes of the kernel against each other; ours is the one the library picks.",
    "host_cost": "What one call costs the host while the device keeps up: ids checked, packed and "
    "brought to the device, kernel launched.",
}

GLOSSARY = (
    "[2,B,N,H,D] is the shape of a layer's cache: 2 for K and V, B blocks, N tokens, H heads, D "
    "elements a head; L is layers, a 2D at the end is K and V side by side. A run is what lies dense "
    "in one piece on both sides. p20, p50 and p80 are over all rounds, in each of which every "
    "contender runs once. ours is this library; a number below 1 under times as fast means that the "
    "other was faster. docs/benchmarks.md says who the others are and how figures come about."
)


def _section(document: Document) -> str:
    series = _series(document.rows)
    kinds: dict[str, list[Row]] = {}
    for row in document.rows:
        extra = f", {row.variant}" if row.variant != "plain" else ""
        kinds.setdefault(f"{row.part} {row.direction}{extra}".lstrip(), []).append(row)
    charts = [_chart(rows, kind, series) for kind, rows in kinds.items()]
    return "\n".join(
        [
            f"<section><h2>{escape(document.benchmark)}</h2>",
            f"<p>{escape(ABOUT.get(document.benchmark, ''))}</p>",
            _machine(document),
            legend(series),
            *charts,
            _times(document.rows),
            _beside([row for row in document.rows if row.beside]),
            _absent(document.rows),
            "</section>",
        ]
    )


def _series(rows: Iterable[Row]) -> list[str]:
    """Ours first, so that it has the first colour, then in order of appearance."""
    return list(dict.fromkeys([OURS, *(name for row in rows for name in row.seconds)]))


def _machine(document: Document) -> str:
    items = [
        f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>"
        for name, value in document.machine.items()
    ]
    return f"<dl>{''.join(items)}</dl>"


def _chart(rows: Sequence[Row], kind: str, series: Sequence[str]) -> str:
    if all(row.beside for row in rows):
        title = (
            f"{kind}: percent that a step takes longer while copies fill the link, less is better"
        )
        groups = [
            Group(_label(r), tuple((n, 100 * (r.slowdown(n) - 1)) for n in r.beside)) for r in rows
        ]
        limit, unit = max(1.0, _largest(groups)), " %"
    elif all(row.ceiling for row in rows):
        title = f"{kind}: rate as a part of the ceiling's, {rows[0].ceiling.replace('_', ' ')}"
        groups = [
            Group(_label(r), tuple((n, r.of_ceiling(n)) for n in r.seconds if n != r.ceiling))
            for r in rows
        ]
        limit, unit = 1.0, ""
    else:
        title = f"{kind}: microseconds a call, less is better"
        groups = [
            Group(_label(r), tuple((n, s.p50 * 1e6) for n, s in r.seconds.items())) for r in rows
        ]
        limit, unit = _largest(groups), " us"
    chart = bar_chart(title, groups, series, limit=limit, unit=unit)
    return f'<h3>{escape(title)}</h3>\n<div class="scroll">{chart}</div>'


def _largest(groups: Sequence[Group]) -> float:
    return max(value for group in groups for _, value in group.bars)


def _label(row: Row) -> str:
    return row.title.removeprefix(f"{row.part} ").replace(f" {row.direction}", "", 1)


def _times(rows: Sequence[Row]) -> str:
    heads = "".join(
        f'<th scope="col">{name}</th>'
        for name in (
            *("case", "run, B", "who", "MB", "p20, us", "p50, us", "p80, us", "p99, us"),
            *("GB/s", "of ceiling", "ours is times as fast", "bit-exact", "path", "parts, us"),
        )
    )
    lines = "\n".join(_line(row, name) for row in rows for name in row.seconds)
    return (
        '<div class="scroll"><table><caption>Every figure. A rate of a copy within one memory counts '
        f"bytes read and bytes written.</caption>\n<thead><tr>{heads}</tr></thead>\n"
        f"<tbody>\n{lines}\n</tbody></table></div>"
    )


def _line(row: Row, name: str) -> str:
    spread = row.seconds[name]
    moved = row.moved.get(name, row.bytes)
    cells = [
        str(row.run_bytes or ""),
        escape(name.replace("_", " ")),
        f"{moved / 1e6:.1f}" if moved else "",
        *(f"{seconds * 1e6:.1f}" for seconds in (spread.p20, spread.p50, spread.p80)),
        "" if spread.p99 is None else f"{spread.p99 * 1e6:.1f}",
        f"{row.gb_s(name):.0f}" if moved else "",
        f"{row.of_ceiling(name):.3f}" if row.ceiling else "",
        f"{row.ratios[name]:.2f}" if name in row.ratios else "",
        "" if name != OURS else "yes" if row.bit_exact else '<span class="bad">NO</span>',
        "" if name != OURS else escape(row.path),
        "" if name != OURS else _parts(row),
    ]
    data = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(row.title)}</th>{data}</tr>'


def _parts(row: Row) -> str:
    return ", ".join(
        f"{escape(name.replace('_', ' '))} {seconds * 1e6:.1f}"
        for name, seconds in row.parts.items()
    )


def _beside(rows: Sequence[Row]) -> str:
    """What was copied beside a loop; nothing where no loop was timed."""
    if not rows:
        return ""
    heads = "".join(
        f'<th scope="col">{name}</th>'
        for name in ("loop", "who copies", "step, us", "times as long as alone", "copied, GB/s")
    )
    lines = "\n".join(
        f'<tr><th scope="row">{escape(row.title)}</th><td>{escape(name.replace("_", " "))}</td>'
        f"<td>{row.seconds[name].p50 * 1e6:.1f}</td><td>{row.slowdown(name):.3f}</td><td>"
        + ", ".join(f"{escape(way)} {rate / 1e9:.1f}" for way, rate in rates.items())
        + "</td></tr>"
        for row in rows
        for name, rates in row.beside.items()
    )
    return (
        '<div class="scroll"><table><caption>Steps of a loop while copies fill the link, and how much '
        f"was copied meanwhile.</caption>\n<thead><tr>{heads}</tr></thead>\n"
        f"<tbody>\n{lines}\n</tbody></table></div>"
    )


def _absent(rows: Sequence[Row]) -> str:
    reasons: dict[tuple[str, str], int] = {}
    for row in rows:
        for item in row.absent.items():
            reasons[item] = reasons.get(item, 0) + 1
    items = "".join(
        f"<li>{escape(name.replace('_', ' '))}: {escape(reason)} ({count} of {len(rows)} rows)</li>"
        for (name, reason), count in reasons.items()
    )
    return f"<h3>Who did not take part</h3>\n<ul>{items}</ul>" if items else ""
