"""How much longer things take here than on a machine that is idle."""

from __future__ import annotations

import os

__all__ = ["slowdown"]

_SAID = float(os.environ.get("LIGHTNING_ZERO_TEST_SLOWDOWN", "1"))


def slowdown() -> float:
    """By what times are to be multiplied: what the environment says, or tasks that want a core."""
    load, num_cores = os.getloadavg()[0], os.cpu_count() or 1  # of the last minute
    return max(_SAID, load / num_cores)
