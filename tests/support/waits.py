"""Waits of this process, shorter than a user's."""

from __future__ import annotations

from lightning_zero.health import reports

__all__ = ["report_waits_after"]


def report_waits_after(seconds):
    """From now on, this rank reports a wait for other ranks after `seconds`."""
    reports.WAIT_REPORT_S = seconds
