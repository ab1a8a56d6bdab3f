"""`python -m tests.simulation [--seed N] [--schedules N] [--kind KIND]`: see `make simulate`."""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
import time
import traceback

from tests.simulation.schedules import KINDS, replay

SCHEDULES = 5000
SHOWN_MAX = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seed", type=int, help="of the first schedule; the others count up from it")
    parser.add_argument("--schedules", type=int, help=f"how many ({SCHEDULES}; with a seed 1)")
    parser.add_argument("--kind", choices=tuple(KINDS), default="", help="only of this kind; else by seed")
    arguments = parser.parse_args()
    schedules = arguments.schedules or (SCHEDULES if arguments.seed is None else 1)
    first = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
    logging.disable(logging.CRITICAL)  # the store speaks of every fault
    print(
        f"seeds {first} to {first + schedules - 1}, schedules of: {arguments.kind or ', '.join(KINDS)}",
        flush=True,
    )
    violations = 0
    started = time.monotonic()
    for seed in range(first, first + schedules):
        try:
            replay(seed, arguments.kind)
        except Exception as error:
            violations += 1
            if violations <= SHOWN_MAX:
                print("".join(traceback.format_exception(error)))
            how = f"python -m tests.simulation --seed {seed} --kind '{arguments.kind}'"
            how = how if arguments.kind else f"make simulate SEED={seed}"
            print(f"VIOLATION {error}; replay with: {how}", flush=True)
    print(f"{schedules} schedules, {violations} violations, {time.monotonic() - started:.0f} s")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
