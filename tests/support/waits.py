"""Waits of this process, shorter than a user's."""

from __future__ import annotations

import time

from lightning_zero.health import exits, reports, watchdog

__all__ = ["PACE", "Pace", "report_waits_after"]

PACE = 0.3  # of a user's: how long waits for a cause last in tests, and what these wait for

# What passes in every failure. Limits that end only what hangs stay as they are.
_WAITS = {
    watchdog: (
        "_CAUSE_S",
        "_END_CONFIRM_S",
        "_SAME_ERROR_S",
        "_SETTLE_S",
    ),
    exits: ("_CONFIRM_S",),
}


class Pace:
    """Shortens the waits of this rank to `pace` times a user's, and those of the test with them."""

    def __init__(self, pace: float = PACE) -> None:
        self.pace = pace
        for module, names in _WAITS.items():
            for name in names:
                setattr(module, name, pace * getattr(module, name))

    def sleep(self, seconds: float) -> None:
        """Sleeps; `seconds` are those beside a user's waits."""
        time.sleep(self.pace * seconds)

    def report_after(self, seconds: float) -> None:
        """From now on, this rank reports a wait for other ranks after so long."""
        report_waits_after(self.pace * seconds)


def report_waits_after(seconds: float) -> None:
    """From now on, this rank reports a wait for other ranks after `seconds`."""
    reports.WAIT_REPORT_S = seconds
