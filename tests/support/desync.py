"""What an error of desynchronized ranks must say, in its order."""

from __future__ import annotations

import re

from lightning_zero.health.failures import DESYNC_HINT

__all__ = ["assert_desynchronized"]

DESYNCHRONIZED = "DesynchronizedError: "


def assert_desynchronized(error: str, reached: str | None, call: str | None = None) -> None:
    """The text names the call, then the cure, then other causes.

    Args:
        error: "DesynchronizedError: " and the text.
        reached: What this rank reached; None: it is the one that has made `call`.
        call: "R reached CALL", where one rank R is known to have made a call alone; it has a line.
    """
    happened, cure, others = error.splitlines()[:3]
    if call is None:
        assert reached is not None
        text = f"this rank reached {re.escape(reached)}, and another rank reached a different call"
    else:
        line = r"\S+\.py:\d+"
        text = f"rank {re.escape(call)}, {line}; not every rank did"
        text += "" if reached is None else f": this rank reached {re.escape(reached)}"
    assert re.fullmatch(rf"{DESYNCHRONIZED}{text}\.", happened), error
    assert cure == DESYNC_HINT, error
    assert others.startswith("Otherwise one rank has fewer or more batches, "), error
