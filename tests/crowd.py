"""How much longer things take here than on a machine that is idle."""

from __future__ import annotations

import os

__all__ = ["slowdown"]

_MOST = 8.0
_SAID = float(os.environ.get("LIGHTNING_ZERO_TEST_SLOWDOWN", "1"))


def slowdown() -> float:
    """By what times are to be multiplied: what the environment says, or tasks that want a core."""
    load = os.getloadavg()[0]  # of the last minute
    return max(_SAID, min(load / len(os.sched_getaffinity(0)), _MOST))
