"""``python -m bench run kernels|store_load [--size-mb N] [--json FILE]``"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import kernels, machine, store_load

BENCHMARKS = {"kernels": kernels.run, "store_load": store_load.run}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure and print a table")
    run.add_argument("name", choices=sorted(BENCHMARKS))
    run.add_argument("--size-mb", type=int, default=256, help="payload of a case")
    run.add_argument("--rounds", type=int, default=15)
    run.add_argument("--max-programs", type=int, help="bound on the kernels' grid")
    run.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()

    header = machine.describe()
    print(json.dumps(header))
    rows = BENCHMARKS[arguments.name](
        size_mb=arguments.size_mb,
        rounds=arguments.rounds,
        max_programs=arguments.max_programs,
    )
    if arguments.json:
        result = {"machine": header, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row["bit_exact"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
