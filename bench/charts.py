"""Horizontal bar charts as SVG text; colours come from the page's style sheet."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LABEL_WIDTH, PLOT_WIDTH, VALUE_WIDTH = 330, 470, 80
BAR, GAP, TOP, BOTTOM = 13, 9, 26, 26
TICKS = 5
COLOURS = 8
"""Series that the page's style sheet can tell apart."""


@dataclass(frozen=True)
class Group:
    """Bars that belong together: (series, value), drawn from the top."""

    label: str
    bars: tuple[tuple[str, float], ...]


def bar_chart(
    title: str, groups: Sequence[Group], series: Sequence[str], *, limit: float, unit: str
) -> str:
    """``series`` decides each one's colour; a bar beyond ``limit`` is cut there and says so.

    A bar of a value below zero has no length.
    """
    height = TOP + sum(len(g.bars) * BAR + GAP for g in groups) + BOTTOM
    width = LABEL_WIDTH + PLOT_WIDTH + VALUE_WIDTH
    parts = [
        f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">',
        f"<title>{escape(title)}</title>",
        *_grid(height, limit, unit),
    ]
    y = TOP
    for group in groups:
        middle = y + len(group.bars) * BAR / 2
        parts.append(_text(LABEL_WIDTH - 8, middle + 4, group.label, "label", "end"))
        for name, value in group.bars:
            parts.append(_bar(y, name, value, series.index(name), limit, unit))
            y += BAR
        y += GAP
    return "\n".join([*parts, "</svg>"])


def legend(series: Sequence[str]) -> str:
    """The colour of each series, for all charts that share them."""
    items = [
        f'<li><span class="swatch b{index}"></span>{escape(name.replace("_", " "))}</li>'
        for index, name in enumerate(series)
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _grid(height: float, limit: float, unit: str) -> list[str]:
    lines = []
    for tick in range(TICKS + 1):
        value = limit * tick / TICKS
        x = LABEL_WIDTH + PLOT_WIDTH * tick / TICKS
        lines.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>'
        )
        lines += [
            _text(x, y, f"{value:.4g}{unit}", "tick", "middle") for y in (TOP - 8, height - 8)
        ]
    return lines


def _bar(y: float, name: str, value: float, colour: int, limit: float, unit: str) -> str:
    length = PLOT_WIDTH * min(max(value, 0.0), limit) / limit
    shown = f"{value:.3g}{unit}" + (" →" if value > limit else "")
    return (
        f'<g><title>{escape(name)}: {shown}</title><rect class="b{colour}" x="{LABEL_WIDTH}" '
        f'y="{y + 1:.1f}" width="{max(length, 1):.1f}" height="{BAR - 2}"/>'
        f"{_text(LABEL_WIDTH + length + 5, y + BAR - 3, shown, 'value', 'start')}</g>"
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )
