"""Draw the panels of a Grafana dashboard without Grafana: its queries, asked of a Prometheus, as one PNG.

    python docs/grafana/render.py --prometheus http://127.0.0.1:9090 --minutes 10 -o dashboard.png

Needs matplotlib (and Pillow, which comes with it). It knows what ``dashboard.json`` uses: rows, stats and time series, stacked or not.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")
import matplotlib.dates as mdates
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, MultipleLocator
from PIL import Image

COLUMNS = 24  # of Grafana's grid
UNIT_INCHES = 0.36  # height of a row of the grid
POINTS = 200
PNG_COLOURS = 255  # of the PNG, so that it stays small
BACKGROUND, PANEL, INK, DIM = "#111217", "#181b1f", "#d8d9da", "#7b8087"
COLOURS = [
    *("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#ffa6b0"),
    *("#96d98d", "#ffee52", "#c0d8ff", "#ffcb7d", "#ff7383", "#deb6f2"),
]
SUFFIX = {"reqps": " req/s", "ops": " /s", "s": " s", "Bps": "B/s", "bytes": "B"}


@dataclass(frozen=True)
class Series:
    name: str
    times: list[float]
    values: list[float]


@dataclass(frozen=True)
class Asked:
    """Which time is drawn, of which Prometheus."""

    url: str
    begin: float
    end: float

    def series(self, expression: str, legend: str) -> list[Series]:
        step = max(1.0, (self.end - self.begin) / POINTS)
        window = f"{max(60, math.ceil(4 * step))}s"
        query = expression.replace("$__rate_interval", window).replace("$instance", ".*")
        fields = {"query": query, "start": self.begin, "end": self.end, "step": step}
        where = f"{self.url}/api/v1/query_range?{urllib.parse.urlencode(fields)}"
        with urllib.request.urlopen(where, timeout=30) as answer:
            found = json.load(answer)["data"]["result"]
        return [
            Series(
                _named(legend, one["metric"]),
                [float(at) for at, _ in one["values"]],
                [float(value) for _, value in one["values"]],
            )
            for one in found
        ]


def _named(legend: str, labels: dict[str, str]) -> str:
    for label, value in labels.items():
        legend = legend.replace("{{" + label + "}}", value)
    return legend


def written(value: float, unit: str) -> str:
    """A value as Grafana would write it, more or less."""
    if math.isnan(value):
        return "no data"
    if unit == "percentunit":
        return f"{value:.1%}"
    scale, prefixes = (
        (1024.0, ["", "Ki", "Mi", "Gi", "Ti"])
        if unit == "bytes"
        else (1e3, ["", "k", "M", "G", "T"])
    )
    if unit == "s" and 0 < value < 1:
        small, what = (1e6, "us") if value < 1e-3 else (1e3, "ms")
        return f"{value * small:.3g} {what}"
    power = 0
    while abs(value) >= scale and power < len(prefixes) - 1:
        value, power = value / scale, power + 1
    suffix = SUFFIX.get(unit, "")
    gap = " " if suffix and not suffix.startswith(" ") else ""
    return f"{value:.3g}{gap}{prefixes[power]}{suffix}"


def draw_stat(axes: plt.Axes, panel: dict, asked: Asked) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    (target,) = panel["targets"]
    found = asked.series(target["expr"], "")
    values = [value for value in (found[0].values if found else []) if not math.isnan(value)]
    axes.set_xticks([])
    axes.set_yticks([])
    if values:
        axes.fill_between(range(len(values)), values, alpha=0.15, color=COLOURS[0], linewidth=0)
        axes.set_ylim(0, max(values) * 2.5 or 1)
        axes.set_xlim(0, max(1, len(values) - 1))
    text = written(values[-1] if values else math.nan, unit)
    axes.text(
        *(0.5, 0.5, text),
        transform=axes.transAxes,
        ha="center",
        va="center",
        color=COLOURS[0],
        fontsize=17,
    )


def draw_lines(axes: plt.Axes, panel: dict, asked: Asked) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    found = [
        one
        for target in panel["targets"]
        for one in asked.series(target["expr"], target["legendFormat"])
    ]
    stacked = "stacking" in defaults["custom"]
    below: dict[float, float] = {}
    for index, one in enumerate(found):
        colour = COLOURS[index % len(COLOURS)]
        times = [mdates.num2date(at / 86400) for at in one.times]
        floor = [below.get(at, 0.0) if stacked else 0.0 for at in one.times]
        values = [
            base + (0.0 if stacked and math.isnan(value) else value)
            for base, value in zip(floor, one.values, strict=True)
        ]
        if stacked:
            below.update(zip(one.times, values, strict=True))
        axes.plot(times, values, color=colour, linewidth=0.9, label=one.name)
        axes.fill_between(
            times, floor, values, color=colour, alpha=0.4 if stacked else 0.08, linewidth=0
        )
    axes.set_xlim(mdates.num2date(asked.begin / 86400), mdates.num2date(asked.end / 86400))
    axes.set_ylim(bottom=defaults.get("min", 0), top=defaults.get("max"))
    axes.xaxis.set_major_formatter(mdates.DateFormatter("%H:%M"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, defaults["unit"])))
    axes.grid(color="#2c3235", linewidth=0.5)
    axes.tick_params(colors=DIM, labelsize=6, length=0)
    axes.locator_params(axis="y", nbins=5)
    if defaults["unit"] == "bytes":  # at round numbers of MiB and GiB
        step = 2.0 ** math.ceil(math.log2(max(axes.get_ylim()[1] / 5, 1)))
        axes.yaxis.set_major_locator(MultipleLocator(step))
    axes.xaxis.set_major_locator(mdates.AutoDateLocator(maxticks=6))
    if found:
        axes.legend(
            loc="upper left", bbox_to_anchor=(0, -0.12), ncols=3, fontsize=5.5, frameon=False,
            labelcolor=INK, handlelength=1, columnspacing=1, borderaxespad=0,
        )  # fmt: skip
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color=DIM, fontsize=8)


def render(dashboard: dict, asked: Asked, columns: int = COLUMNS) -> plt.Figure:
    """All panels where the dashboard has them."""
    panels = dashboard["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    width, height = 13.0, (rows + 2) * UNIT_INCHES
    figure = plt.figure(figsize=(width, height), facecolor=BACKGROUND)
    top = 2 * UNIT_INCHES / height
    figure.text(0.012, 1 - top * 0.6, dashboard["title"], color=INK, fontsize=12, weight="bold")
    unit = (1 - top) / rows
    for panel in panels:
        grid = panel["gridPos"]
        left, bottom = grid["x"] / columns, 1 - top - (grid["y"] + grid["h"]) * unit
        wide, high = grid["w"] / columns, grid["h"] * unit
        if panel["type"] == "row":
            figure.text(0.012, bottom + high * 0.3, panel["title"], color=INK, fontsize=9)
            continue
        figure.add_artist(
            plt.Rectangle(
                (left + 0.004, bottom + 0.12 * unit),
                wide - 0.008,
                high - 0.24 * unit,
                color=PANEL,
                zorder=-1,
            )
        )
        figure.text(
            left + 0.01, bottom + high - 0.8 * unit, panel["title"], color=INK, fontsize=7.5
        )
        stat = panel["type"] == "stat"
        pad = (
            (0.01, 0.3 * unit, 0.02, 1.2 * unit) if stat else (0.045, 2.1 * unit, 0.06, 3.3 * unit)
        )
        axes = figure.add_axes(
            (left + pad[0], bottom + pad[1], wide - pad[2], high - pad[3]), facecolor=PANEL
        )
        for spine in axes.spines.values():
            spine.set_visible(False)
        (draw_stat if stat else draw_lines)(axes, panel, asked)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument(
        "--dashboard", type=Path, default=Path(__file__).with_name("dashboard.json")
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("-o", "--output", type=Path, required=True)
    chosen = parser.parse_args()
    end = time.time()  # noqa: TID251 - Prometheus wants the time of day
    asked = Asked(chosen.prometheus.rstrip("/"), end - 60 * chosen.minutes, end)
    figure = render(json.loads(chosen.dashboard.read_text()), asked)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    Image.open(drawn).convert("RGB").quantize(PNG_COLOURS).save(chosen.output, optimize=True)


if __name__ == "__main__":
    main()
