"""``python -m bench run NAME``, ``compare A.json B.json``, ``report A.json ... -o FILE``"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from pathlib import Path

import torch

from . import gate, machine
from .compare import compare
from .options import Options
from .report import render
from .results import SCHEMA, Document, ResultError, read, write

BENCHMARKS = (
    "kernels",
    "peer",
    "engine",
    "arena",
    "host_cost",
    "sweep",
    "planner",
    "server",
    "tiers",
)
DEVICES = {"peer": 2, "server": 0, "tiers": 0}
"""How many GPUs a benchmark needs, where that is not one."""


def main(arguments: list[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    try:
        return int(chosen.act(chosen))
    except ResultError as error:
        print(error, file=sys.stderr)
        return 2


def _run(chosen: argparse.Namespace) -> int:
    devices = torch.cuda.device_count()
    needed = DEVICES.get(chosen.name, 1)
    if devices < needed:
        print(f"{chosen.name}: needs {needed} CUDA devices, found {devices}", file=sys.stderr)
        return 2
    header = machine.describe()
    print("  ".join(f"{name}: {value}" for name, value in header.items()), flush=True)
    if chosen.gate and needed and not gate.is_open():
        print("gate: the tests fail, so nothing is measured", file=sys.stderr)
        return 1
    options = Options(
        chosen.size_mb, chosen.rounds, chosen.only, chosen.max_programs, chosen.seconds
    )
    rows = importlib.import_module(f".{chosen.name}", __package__).run(options)
    document = Document(SCHEMA, chosen.name, header, rows)
    if chosen.json:
        write(document, chosen.json)
    if chosen.report:
        chosen.report.write_text(render([document]))
    return 0 if all(row.bit_exact and not row.failures for row in rows) else 1


def _compare(chosen: argparse.Namespace) -> int:
    print("\n".join(compare(read(chosen.before), read(chosen.after))))
    return 0


def _report(chosen: argparse.Namespace) -> int:
    chosen.output.write_text(render([read(path) for path in chosen.results]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench")
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="measure and print a table")
    run.add_argument("name", choices=BENCHMARKS)
    run.add_argument("--size-mb", type=int, default=256, help="least payload of a case")
    run.add_argument("--rounds", type=_at_least_two, default=15, help="timed runs of everyone")
    run.add_argument("--only", metavar="PATTERN", help="cases that have this in their title")
    run.add_argument("--max-programs", type=int, help="bound on the kernels' grid (engine)")
    run.add_argument(
        "--seconds", type=_at_least_one, default=60.0, help="how long a load lasts (server)"
    )
    run.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    run.add_argument("--report", type=Path, metavar="FILE", help="also write a page with plots")
    run.add_argument(
        "--no-gate", dest="gate", action="store_false", help="do not run the GPU tests first"
    )
    run.set_defaults(act=_run)
    comparing = commands.add_parser("compare", help="what moved between two results")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.set_defaults(act=_compare)
    reporting = commands.add_parser("report", help="one page with the plots of results")
    reporting.add_argument("results", type=Path, nargs="+")
    reporting.add_argument("-o", "--output", type=Path, required=True)
    reporting.set_defaults(act=_report)
    return parser


def _at_least_two(text: str) -> int:
    rounds = int(text)
    if rounds < 2:
        raise argparse.ArgumentTypeError("quantiles need two rounds at least")
    return rounds


def _at_least_one(text: str) -> float:
    seconds = float(text)
    if not 1 <= seconds < math.inf:
        raise argparse.ArgumentTypeError("expected a second at least")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
