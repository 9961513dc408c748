"""Groups of ranks that hold all shards each: the values of data parallel, on 2 x 2 ranks."""

from __future__ import annotations

from functools import partial

import numpy as np

from tests.distributed.ranks import run_ranks
from tests.fitting import assert_same, fit, fit_reference, settings
from tests.models import GPTModule

STAGES = [1, 2, 3]
ACCUMULATING = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
GPT = partial(GPTModule, ranks=4, num_batches=5, optimizer="sgd")


def grouped(stage, **options):
    return settings(stage, sharding_group_size=2, **options)


def _fit_each(rank, world_size, cases):
    return [fit(rank, world_size, *case) for case in cases]


def test_2_x_2_equals_ddp_in_every_stage_with_accumulation_and_clipping():
    cases = [(grouped(stage), GPT, ACCUMULATING) for stage in STAGES]
    ranks = run_ranks(4, _fit_each, cases, has_group=False)
    reference = fit_reference(4, GPT, ACCUMULATING)
    for ours in zip(*ranks, strict=True):
        assert_same(ours, reference)
        for name, value in ours[0].state.items():
            for other in ours[1:]:
                np.testing.assert_array_equal(value, other.state[name], err_msg=name)
