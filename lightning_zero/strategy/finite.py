"""Names the parameters that are not finite when a checkpoint is saved."""

from __future__ import annotations

import torch

from lightning_zero.engine.engine import Engine

__all__ = ["NONFINITE_KEY", "find_nonfinite_parameters"]

NONFINITE_KEY = "nonfinite_parameters"  # in the entry METADATA_KEY: names; absent: all are finite


def find_nonfinite_parameters(engine: Engine) -> list[str]:
    """Names of the parameters with a NaN or an infinity on any rank. Collective: every rank."""
    own: list[str] = []
    with torch.no_grad():
        for bucket in engine.buckets:
            shard = bucket.masters.fetch()
            if not bool(shard.sum().isfinite()):  # also if the sum overflows
                slots, parts = bucket.plan.layout.slots, bucket.shards.layout.split(shard)
                own += [
                    slot.name
                    for slot, part in zip(slots, parts, strict=True)
                    if not bool(part.isfinite().all())
                ]
    by_rank = engine.comm.control.gather_objects(own)
    return list(dict.fromkeys(name for names in by_rank for name in names))
