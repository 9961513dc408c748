"""States that leave the device between two steps: `Engine.offload_states`."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from lightning_zero import full_grad, full_state_dict, gathered, save_checkpoint
from lightning_zero.layout.stage import State
from tests.support.cells import ANY_STAGE
from tests.support.fitting import arrays
from tests.support.loops import batch, build, engine_for
from tests.support.warm import run_ranks


def _train(rank, world_size, stage, states, options):
    """Trains; between two micro-batches, and before and after each step, offloads `states`."""
    module, optimizer = build()
    engine = engine_for(module, [optimizer], stage, **options)

    def generate():
        if states is not None:
            engine.offload_states(states)
            engine.reload_states()

    losses, norms = [], []
    for step in range(6):
        with engine.no_sync() if step % 2 == 0 else contextlib.nullcontext():
            loss = module(batch(rank, step))
            engine.backward(loss / 2)
        losses.append(loss.item())
        generate()
        if step % 2:
            norms.append(float(engine.clip_grad_norm_(0.05)))
            engine.step()
            generate()
            engine.zero_grad()
    engine.close()
    return losses, norms, arrays(module.state_dict())


def assert_equal(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        assert one[:2] == other[:2]
        for name, value in one[2].items():
            np.testing.assert_array_equal(value, other[2][name], err_msg=name)


OPTIONS = [{}, {"param_dtype": "bfloat16"}, {"offload_optimizer": "cpu"}, {"overlap_step": True}]


@pytest.mark.shows("`Engine.offload_states`")
@pytest.mark.default_cases("3-bfloat16")
@pytest.mark.parametrize("options", OPTIONS[:2], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stage", range(4))
def test_training_is_bit_equal_after_all_states_were_offloaded(stage, options):
    every = ["parameters", "gradients", "optimizer"]
    ours = run_ranks(2, _train, stage, every, options)
    assert_equal(ours, run_ranks(2, _train, stage, None, options))


@pytest.mark.slow
@pytest.mark.parametrize("states", ["parameters", "gradients", "optimizer"])
@pytest.mark.parametrize("options", OPTIONS, ids=["float32", "bfloat16", "cpu", "overlap"])
def test_training_is_bit_equal_after_one_state_was_offloaded(options, states):
    ours = run_ranks(2, _train, 2, states, options)
    assert_equal(ours, run_ranks(2, _train, 2, None, options))


def _memory(rank, world_size, stage, param_dtype):
    module, optimizer = build()
    engine = engine_for(module, [optimizer], stage, param_dtype=param_dtype)
    engine.backward(module(batch(rank, 0)))
    engine.step()
    engine.zero_grad()
    engine.backward(module(batch(rank, 1)))
    before = engine.memory_report()
    engine.offload_states()
    during = engine.memory_report()
    engine.reload_states()
    return before, during, engine.memory_report()


@pytest.mark.default_cases("3-bfloat16")
@pytest.mark.parametrize("param_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("stage", ANY_STAGE)
def test_no_state_has_device_memory_while_it_is_offloaded(stage, param_dtype):
    for before, during, after in run_ranks(2, _memory, stage, param_dtype):
        assert before.tiers == after.tiers
        single_numbers = 4 * 200  # Adam's step counters, one for each parameter
        for state in State:
            assert during.tiers["device"][state] < single_numbers
            moved = during.tiers["cpu"][state]
            assert moved == before.tiers["device"][state] - during.tiers["device"][state]
            assert moved > 0


def _memory_is_free(rank, world_size):
    module = torch.nn.Linear(2048, 2048, bias=False)  # 16 MiB
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = engine_for(module, [optimizer], 2)
    storage = module.weight.untyped_storage()
    engine.offload_states("parameters")
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.empty(0).set_(storage, 0, (4,), (1,)).isnan().all()
    engine.reload_states("parameters")
    assert not module.weight.isnan().any()


def test_the_memory_itself_is_freed():
    run_ranks(1, _memory_is_free)


def _misuse(rank, world_size, stage, path):
    module, optimizer = build()
    engine = engine_for(module, [optimizer], stage)
    ids = batch(rank, 0)
    engine.backward(module(ids))
    engine.step()
    needs = pytest.raises(RuntimeError, match=r"call engine.reload_states\(\)")

    engine.offload_states("optimizer")
    engine.backward(module(ids))  # needs no optimizer state
    engine.clip_grad_norm_(1.0)
    with needs:
        engine.step()
    with needs:
        optimizer.step()
    with needs:
        engine.optimizer_state(optimizer)
    with needs:
        dict(optimizer.state.items())
    with needs:
        save_checkpoint(engine, path)
    with needs:
        engine.offload_states()  # once is enough
    engine.reload_states()
    engine.step()

    engine.offload_states(["gradients"])
    with torch.no_grad():
        module(ids)
    loss = module(ids)
    with needs:
        engine.backward(loss)
    with needs:
        engine.zero_grad()
    with needs:
        full_grad(module.gpt.blocks[0].up.weight)
    engine.reload_states(["gradients"])
    engine.backward(loss)

    engine.offload_states("parameters")
    for use, inputs in ((module, ids), (module.gpt.blocks[0], torch.zeros(1, 3, 32))):
        with needs, torch.no_grad():
            use(inputs)
    with needs:
        full_state_dict(engine)
    with needs:
        print(module.gpt.blocks[0].up.weight + 1)
    for writeback in (False, True):
        with needs, gathered(module, writeback=writeback):
            pass
    with needs:
        module.gpt.blocks[0].up.weight.data = torch.zeros(128, 32)
    engine.reload_states()
    with pytest.raises(ValueError, match="'weights'"):
        engine.offload_states("weights")
    for writeback in (False, True):
        with gathered(module, writeback=writeback):
            held = [parameter.clone() for parameter in module.parameters()]
            with pytest.raises(RuntimeError, match=r"a context that holds parameters.*leave it"):
                engine.offload_states("parameters")
            engine.reload_states()
            assert all(map(torch.equal, held, module.parameters()))
    loss = module(ids)
    with pytest.raises(RuntimeError, match="not between steps"):
        engine.offload_states()
    engine.backward(loss)
    engine.offload_states()
    engine.close()  # reloads
    assert not any(p.isnan().any() for p in module.parameters())


@pytest.mark.parametrize("stage", ANY_STAGE)
def test_what_needs_an_offloaded_state_is_refused(stage, tmp_path):
    run_ranks(2, _misuse, stage, str(tmp_path / "one.ckpt"))


def _differ(rank, world_size):
    module, optimizer = build()
    engine = engine_for(module, [optimizer], 2)
    with pytest.raises(RuntimeError, match=r"rank 0 reached offload_states\(\['parameters'\]\)"):
        engine.offload_states("optimizer" if rank else "parameters")


def test_states_that_differ_between_ranks_are_an_error_on_all():
    run_ranks(2, _differ)
