"""Runs random training programs against plain torch, for `--minutes`, by default an hour.

    python -m tests.tools.random_programs

Prints each seed whose program differs or fails, with the program; ends with status 1 where there is
one. `--seed N` runs one program, and prints it.
"""

from __future__ import annotations

import argparse
import random
import time

from tests.support.programs import Program, differences, run_plain, run_sharded
from tests.support.ranks import RankError, run_ranks


def find_fault(seed: int) -> str | None:
    """What is wrong with the program of a seed, in one line; None: it is equal on both sides."""
    program = Program.of(seed)
    try:
        ranks = run_ranks(program.world_size, run_sharded, [seed])
    except RankError as error:
        lines = [line.strip() for line in str(error).splitlines() if "Error: " in line]
        return lines[-1] if lines else str(error)
    return next(differences(run_plain(program), [seen for (seen,) in ranks]), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="run this program alone")
    args = parser.parse_args()
    if args.seed is not None:
        print(Program.of(args.seed))
        fault = find_fault(args.seed)
        print(fault or "equal")
        return int(fault is not None)
    first = seed = random.SystemRandom().randrange(10**6, 10**9)
    num_faults = 0
    until = time.monotonic() + 60 * args.minutes
    while time.monotonic() < until:
        fault = find_fault(seed)
        if fault is not None:
            num_faults += 1
            print(f"seed {seed}: {fault}\n    {Program.of(seed)}", flush=True)
        seed += 1
    print(f"{seed - first} programs from seed {first}, {num_faults} with a fault")
    return int(num_faults > 0)


if __name__ == "__main__":
    raise SystemExit(main())
