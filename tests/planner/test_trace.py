"""Activations of a step on fake tensors, compared with those of the same step on real ones."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_zero import ZeroConfig
from lightning_zero.layout.plan import make_plan
from lightning_zero.planner import (
    Decoder,
    DecoderShape,
    extrapolate_trace,
    find_repeated_blocks,
    trace_step,
)
from lightning_zero.planner.trace import Event
from tests.support.planned import MODELS, loss_of


def units_of(module):
    return [unit.name for unit in make_plan(module, ZeroConfig(stage=3), world_size=2).units]


def a_decoder(num_layers, is_gated=False):
    with torch.device("meta"):
        return Decoder(DecoderShape(32, num_layers, 4, 67, 8, is_gated=is_gated))


def trace(module, step=None, gone=(), checkpointed=()):
    step = step or partial(loss_of, batch=MODELS["gpt"].batch())
    units = [name for name in units_of(module) if name not in gone]
    checkpointed = [name for name in checkpointed if name not in gone]
    return trace_step(module, step, units=units, checkpointed=checkpointed)


@pytest.mark.default_cases("llama", "lora", "tied")
@pytest.mark.parametrize("name", list(MODELS))
def test_saved_bytes_are_those_that_autograd_saves(name):
    module = MODELS[name].build()
    own = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    batch = MODELS[name].batch()
    given = {t.untyped_storage()._cdata for t in batch}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        saved[storage._cdata] = (storage, storage.nbytes())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(module, batch)
    kept = sum(size for key, (_, size) in saved.items() if key not in own | given)
    # More by the loss itself, and by a few numbers that are not needed any more.
    found = trace(module, partial(loss_of, batch=batch)).saved_bytes
    assert kept <= found <= 1.05 * kept + 2048
    assert loss.requires_grad


def test_a_trace_leaves_the_module_as_it_was():
    module = MODELS["conv"].build().eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    trace_step(module, partial(loss_of, batch=MODELS["conv"].batch()), units=[""])
    assert not any(child.training for child in module.modules())
    assert all(value.equal(module.state_dict()[name]) for name, value in before.items())
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in module.parameters())
    assert torch.get_rng_state().equal(state)


def test_every_gradient_comes_once_and_units_begin_and_end_in_turn():
    module = a_decoder(3)
    moments = trace(module).moments
    grads = [m.name for m in moments if m.event is Event.GRAD]
    assert sorted(grads) == sorted(name for name, _ in module.named_parameters())
    forward = [m.name for m in moments if m.event is Event.PRE_FORWARD]
    backward = [m.name for m in moments if m.event is Event.PRE_BACKWARD]
    assert forward == ["blocks.0", "blocks.1", "blocks.2"] == backward[::-1]


def test_a_step_that_reads_values_is_refused_with_a_reason():
    def step(module):
        loss = loss_of(module, MODELS["gpt"].batch())
        return loss if loss.item() > 0 else -loss

    with pytest.raises(
        ValueError, match=r"Decoder cannot be traced on fake tensors \(DataDependent"
    ):
        trace(a_decoder(2), step)


@pytest.mark.default_cases("False-False")
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_deep_model_is_traced_from_four_blocks_to_the_byte(is_gated, is_checkpointed):
    module = a_decoder(11, is_gated)
    units = units_of(module)
    checkpointed = [name for name in units if name] if is_checkpointed else []
    repeats = find_repeated_blocks(module, units)
    assert repeats.container == "blocks"
    short = extrapolate_trace(
        module, repeats, lambda gone: trace(module, gone=gone, checkpointed=checkpointed)
    )
    assert short == trace(module, checkpointed=checkpointed)
    assert len(module.blocks) == 11


def test_blocks_that_differ_are_all_run():
    module = a_decoder(9)
    module.blocks[5].up = nn.Linear(32, 7, device="meta")
    assert find_repeated_blocks(module, units_of(module)) is None

    class Growing(Decoder):
        """Every call saves more activations than the one before."""

        def forward(self, ids):
            x, kept = self.tokens(ids), []
            for block in self.blocks:
                x = block(x)
                kept.append(x)
                x = x + torch.stack(kept).exp().sum(0)
            return self.head(x)

    with torch.device("meta"):
        module = Growing(DecoderShape(32, 9, 4, 67))
    repeats = find_repeated_blocks(module, units_of(module))
    assert extrapolate_trace(module, repeats, lambda gone: trace(module, gone=gone)) is None
