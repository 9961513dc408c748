"""Optimizers with quantized states step as in one process, and the states are saved as they are."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch

from lightning_zero import Engine, ZeroConfig
from lightning_zero.checkpoint import load_optimizer, open_checkpoint
from lightning_zero.layout.stage import State
from lightning_zero.optim.state import optimizer_state_dict
from lightning_zero.tensors.composite import flatten_composites, plain_tensors
from tests.support.fitting import arrays, make_trainer, run_once, settings
from tests.support.low_bit import KINDS, LIBRARIES, BlockModule, Blocks, builder_of
from tests.support.warm import run_ranks

LIBRARY = pytest.mark.parametrize(
    "library",
    [
        pytest.param(name, marks=pytest.mark.skipif(name not in LIBRARIES, reason=f"needs {name}"))
        for name in KINDS
    ],
)
X = torch.linspace(-2, 2, 48).view(6, 8)


def assert_equal_bits(one, other):
    """Compares two trees of states, including the inner tensors of quantized ones."""
    one, other = flatten_composites(one), flatten_composites(other)
    if isinstance(other, dict):
        assert set(one) == set(other)
        for key, value in other.items():
            assert_equal_bits(one[key], value)
    elif isinstance(other, (tuple, list)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_equal_bits(mine, theirs)
    elif isinstance(other, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.clone(), other.clone())
    else:
        assert one == other


def _train(module, optimizers, engine, number):
    """Steps on the same data on every rank, so that the mean gradient has the bits of one."""
    loss = module(X + number).square().mean()
    engine.backward(loss) if engine else loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _step_and_resume(rank, world_size, stage, kinds, folder):
    torch.serialization.add_safe_globals([Blocks])
    for kind in kinds:
        build = partial(builder_of(kind), lr=1e-2)
        torch.manual_seed(0)
        module = BlockModule().layers
        alone = copy.deepcopy(module)
        optimizer, expected = build(module.parameters()), build(alone.parameters())
        engine = Engine(module, [optimizer], ZeroConfig(stage=stage))
        for number in range(3):
            _train(module, [optimizer], engine, number)
            _train(alone, [expected], None, number)
        held = engine.memory_report().tiers["device"][State.OPTIM]
        own = plain_tensors([dict(state) for state in optimizer.state.values()])
        assert held == sum(t.numel() * t.element_size() for t in own)
        state = optimizer_state_dict(optimizer, engine.buckets, is_recipient=rank == 0)
        path = f"{folder}/{kind}"
        if rank == 0:
            by_number = dict(enumerate(expected.state[p] for p in alone.parameters()))
            assert_equal_bits(state["state"], by_number)
            torch.save(state, path)
        torch.distributed.barrier()
        engine.close()
        for mine, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            assert torch.equal(mine, theirs), kind
            assert_equal_bits(dict(optimizer.state[mine]), dict(expected.state[theirs]))

        optimizer = build(module.parameters())
        engine = Engine(module, [optimizer], ZeroConfig(stage=4 - stage))
        load_optimizer(engine, optimizer, torch.load(path, weights_only=True, mmap=True))
        for number in range(2):
            _train(module, [optimizer], engine, number)
            _train(alone, [expected], None, number)
        engine.close()
        for mine, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            assert torch.equal(mine, theirs), kind


@pytest.mark.default_cases("3-tests")
@LIBRARY
@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_and_states_have_the_bits_of_one_process(tmp_path, stage, library):
    run_ranks(2, _step_and_resume, stage, KINDS[library], str(tmp_path), timeout_s=120)


CHAIN = [(1, 2, "full"), (3, 2, "sharded"), (0, 1, "full")]  # stage, ranks, what is saved


def _fit(rank, world_size, spec, kinds, source, folder, max_epochs):
    """Trains `max_epochs`, saving at start and end; returns the parameters by kind."""
    torch.serialization.add_safe_globals([Blocks])
    states = {}
    for kind in kinds:
        builder_of(kind)  # registers its classes for torch.load
        torch.manual_seed(0)
        module = BlockModule(kind, ranks=2, batch_size=4, num_batches=2)
        trainer = make_trainer(spec, max_epochs=max_epochs)
        if folder:
            save = trainer.save_checkpoint
            module.on_train_start = partial(save, f"{folder}/{kind}.loaded")
            module.on_train_end = partial(save, f"{folder}/{kind}.trained")
        trainer.fit(module, ckpt_path=source and f"{source}/{kind}.trained")
        states[kind] = arrays(module.state_dict())
    return states


def _opened(path, kind):
    module = BlockModule(kind)
    builder_of(kind)  # registers its classes for torch.load
    numbers = {name: i for i, (name, _) in enumerate(module.named_parameters())}
    checkpoint = open_checkpoint(path)
    (states,) = checkpoint["optimizer_states"]
    return checkpoint["state_dict"], {numbers.get(k, k): v for k, v in states["state"].items()}


@pytest.mark.slow
@LIBRARY
def test_a_run_resumes_from_full_and_sharded_checkpoints_with_the_same_states(tmp_path, library):
    torch.serialization.add_safe_globals([Blocks])
    kinds, source = KINDS[library][:2], None
    for epoch, (stage, world_size, form) in enumerate(CHAIN):
        folder = tmp_path / str(epoch)
        folder.mkdir()
        spec = settings(stage, checkpoint=form)
        arguments = (spec, kinds, source, str(folder), epoch + 1)
        results = run_ranks(world_size, _fit, *arguments, has_group=False, timeout_s=120)
        for kind in kinds:
            trained = _opened(folder / f"{kind}.trained", kind)
            if kind != "bitsandbytes.optim.AdamW32bit":
                assert any(t.dtype.itemsize == 1 for t in plain_tensors(trained[1]))
            if source is not None:
                loaded = _opened(folder / f"{kind}.loaded", kind)
                assert_equal_bits(loaded, _opened(f"{source}/{kind}.trained", kind))
        source = str(folder)
    (expected,) = run_once(1, _fit, "auto", kinds, None, None, len(CHAIN))
    for kind, state in expected.items():
        for key, value in state.items():
            # A mean gradient that is rounded differently may change a code of a state.
            np.testing.assert_allclose(results[0][kind][key], value, atol=2e-3, err_msg=key)


def test_an_optimizer_wrongly_promised_elementwise_fails_with_its_name():
    run_ranks(2, _break_promise)


def _break_promise(rank, world_size):
    module = torch.nn.Linear(64, 256, bias=False)
    optimizer = builder_of(KINDS["tests"][0])(module.parameters())
    engine = Engine(module, [optimizer], ZeroConfig(stage=1, assume_elementwise=True))
    engine.backward(module(torch.ones(2, 64)).sum())
    with pytest.raises(RuntimeError, match=r"Blockwise keeps momentum of weight as Blocks"):
        engine.step()
