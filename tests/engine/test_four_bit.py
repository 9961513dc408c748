"""Frozen weights of 4 bits (QLoRA) keep their bits, sharded or not, and are resumed."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch

from lightning_zero import Engine, ZeroConfig
from tests.support.fitting import arrays, make_trainer, run_once, settings
from tests.support.four_bit import LIBRARIES, LINEARS, FourBitModule
from tests.support.warm import run_ranks

LIBRARY = pytest.mark.parametrize(
    "library",
    [
        pytest.param(name, marks=pytest.mark.skipif(name not in LIBRARIES, reason=f"needs {name}"))
        for name in LINEARS
    ],
)
X = torch.linspace(-2, 2, 48).view(6, 8)


def _train(rank, world_size, stage, library, storages):
    for storage, param_dtype in storages:
        module = FourBitModule(library, storage)
        alone = copy.deepcopy(module)
        codes = {n: p for n, p in alone.named_parameters() if hasattr(p, "quant_state")}
        optimizer, expected = module.configure_optimizers(), alone.configure_optimizers()
        config = ZeroConfig(stage=stage, param_dtype=param_dtype, reduce_bucket_size=2**11)
        engine = Engine(module, [optimizer], config)
        assert len(codes) == 2
        if param_dtype is not None:
            alone_dtype = getattr(torch, param_dtype)
            alone = None  # rounding differs from a plain module: only codes are compared
        for number in range(3):
            x = X + number
            engine.backward(module(x if alone else x.to(alone_dtype)).square().mean())
            engine.step()
            engine.zero_grad()
            if alone:
                alone(x).square().mean().backward()
                expected.step()
                expected.zero_grad()
        engine.close()
        named = dict(module.named_parameters())
        for name, p in codes.items():
            assert type(named[name]) is type(p)
            assert named[name].dtype == storage
            assert torch.equal(named[name].view(torch.uint8), p.view(torch.uint8)), name
        for name, p in alone.named_parameters() if alone else ():
            assert torch.equal(named[name].view(torch.uint8), p.view(torch.uint8)), name


@pytest.mark.default_cases("2-tests")
@LIBRARY
@pytest.mark.parametrize("stage", [2, 3])
def test_codes_stay_what_they_are_and_adapters_are_trained_as_in_one_process(stage, library):
    storages = [
        (torch.uint8, None),
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.uint8, "bfloat16"),
        (torch.float32, "bfloat16"),
    ]
    run_ranks(2, _train, stage, library, storages)


def _fit(rank, world_size, spec, library, source, target, max_epochs, base_seed):
    module = FourBitModule(library, base_seed=base_seed, ranks=2, batch_size=4, num_batches=2)
    trainer = make_trainer(spec, max_epochs=max_epochs)
    if target:
        module.on_train_end = partial(trainer.save_checkpoint, target)
    trainer.fit(module, ckpt_path=source)
    return arrays(module.state_dict())


@pytest.mark.slow
@LIBRARY
def test_a_run_is_resumed_with_the_codes_and_scales_that_were_saved(tmp_path, library):
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    # bitsandbytes recomputes the mean of the scales for saving: no other weights can be loaded.
    seeds = (0, 0) if library == "bitsandbytes" else (1, 2)
    run_ranks(2, _fit, settings(3), library, None, first, 1, 0, has_group=False)
    # The module that resumes has quantized other weights; those of the checkpoint are used.
    spec = settings(2, checkpoint="sharded")
    run_ranks(2, _fit, spec, library, first, second, 2, seeds[0], has_group=False)
    last = (settings(3), library, second, None, 3, seeds[1])
    results = run_ranks(1, _fit, *last, has_group=False)
    (expected,) = run_once(1, _fit, "auto", library, None, None, 3, 0)
    for name, value in expected.items():
        np.testing.assert_allclose(results[0][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
