"""`configure_model` of plain code: parameters are sharded while the module is still being built."""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn

from examples.gpt import GPT, GPTConfig
from lightning_zero.construction import building
from lightning_zero.tensors.partial import PartialParameter, partial_of
from tests.support.fitting import arrays, make_trainer, settings
from tests.support.models import GPTModule, Recorder
from tests.support.ranks import run_ranks
from tests.support.storage import live_storage_bytes

pytestmark = pytest.mark.slow  # it will be removed: modules on the meta device do this

# 6 blocks of 0.2 M parameters, of which 0.13 M may be unsharded at a time.
MODEL = GPTConfig(vocab_size=64, context=8, width=128, num_layers=6, num_heads=4)
UNSHARDED_NUMEL = 2**17


class BuiltGPT(GPTModule):
    """Built in `configure_model` or at once, and initialized by the GPT's own `apply`."""

    def __init__(self, is_late, **kwargs):
        Recorder.__init__(self, **kwargs)
        self.is_late = is_late
        self.num_built = 0
        if not is_late:
            self.build()

    def build(self):
        self.num_built += 1
        self.gpt = GPT(MODEL)

    def configure_model(self):
        if self.is_late and not self.num_built:
            self.build()


class OwnCodeGPT(BuiltGPT):
    """Reads and writes parameters after they were built, in many ways."""

    def build(self):
        super().build()
        blocks = self.gpt.blocks
        kept = blocks[0].qkv.weight.data  # a view that outlives everything that is built later
        blocks[1].up.weight.data = blocks[1].up.weight.data * 2
        with torch.no_grad():
            blocks[2].up.weight.copy_(blocks[3].up.weight + blocks[4].up.weight)
            blocks[2].down.weight.div_(blocks[2].down.weight.norm())
            nn.init.orthogonal_(blocks[5].proj.weight)
        blocks[4] = copy.deepcopy(blocks[5])
        blocks[3].down.weight = blocks[2].down.weight
        blocks[5].load_state_dict(blocks[0].state_dict())
        kept.mul_(0.5)
        self.total = sum(p.numel() for p in self.parameters())
        self.norm = float(torch.stack([p.detach().norm() for p in self.parameters()]).norm())
        self.lateness = [x.item() for x in torch.linspace(0, 1, 3)]


def _train(rank, world_size, cases):
    building._UNSHARDED_NUMEL = UNSHARDED_NUMEL
    found = []
    for factory, is_late, spec, options in cases:
        seed_everything(7, verbose=False)
        # As Lightning does for `configure_model`: random numbers of 16 bits are drawn differently.
        torch.set_default_dtype(torch.bfloat16 if options else torch.float32)
        module = factory(is_late, ranks=world_size, num_batches=2)
        torch.set_default_dtype(torch.float32)
        trainer = make_trainer(spec, **options)
        trainer.fit(module)
        assert module.num_built == 1
        trainer.validate(module, verbose=False)
        found.append((list(module.losses), arrays(module.state_dict()), torch.rand(()).item()))
    return found


@pytest.mark.shows("`configure_model`, sharded as it is built", stages=(3,))
def test_code_in_configure_model_gives_the_values_of_direct_construction():
    cases = [(OwnCodeGPT, is_late, settings(3), {}) for is_late in (False, True)]
    cases += [(BuiltGPT, late, settings(3), {"precision": "bf16-true"}) for late in (False, True)]
    cases += [(BuiltGPT, late, settings(2), {}) for late in (False, True)]
    for found in run_ranks(2, _train, cases, has_group=False, timeout_s=120):
        for at_once, late in zip(found[::2], found[1::2], strict=True):
            assert at_once[0] == late[0]
            assert at_once[2] == late[2], "random numbers of what follows"
            for name, value in at_once[1].items():
                np.testing.assert_array_equal(late[1][name], value, err_msg=name)


class MeasuredGPT(BuiltGPT):
    """Records bytes of live storages after each block is built, and during set-up."""

    def build(self):
        self.seen = []

        class Watched(GPT):
            def _init(gpt, module):
                super()._init(module)
                self.seen.append(live_storage_bytes())

        gc.collect()
        gc.freeze()
        gc.disable()
        self.before = live_storage_bytes()
        self.num_built += 1
        self.gpt = Watched(MODEL)

    def configure_optimizers(self):
        self.seen.append(live_storage_bytes())
        self.num_sharded = sum(partial_of(p) is not None for p in self.parameters())
        return super().configure_optimizers()

    def on_fit_start(self):
        self.seen.append(live_storage_bytes())


def _peak(rank, world_size):
    building._UNSHARDED_NUMEL = UNSHARDED_NUMEL
    read_into, module = PartialParameter.read_into, MeasuredGPT(True, ranks=2, num_batches=1)

    def watched(piece, view):
        read_into(piece, view)
        module.seen.append(live_storage_bytes())

    PartialParameter.read_into = watched
    make_trainer(settings(3)).fit(module)
    return max(module.seen) - module.before, module.num_sharded


def test_the_peak_while_building_is_below_the_full_model():
    with torch.device("meta"):
        model = GPT(MODEL)
    total, block = (sum(p.numel() for p in m.parameters()) for m in (model, model.blocks[0]))
    for peak, num_sharded in run_ranks(2, _peak, has_group=False, timeout_s=120):
        assert num_sharded >= 4 * (MODEL.num_layers - 1)
        assert peak < 4 * (total / 2 + UNSHARDED_NUMEL + 1.2 * block)
        assert peak < 0.9 * 4 * total


class UnevenGPT(BuiltGPT):
    """Makes on one rank a call that no other rank makes."""

    def __init__(self, kind, **kwargs):
        super().__init__(True, **kwargs)
        self.kind = kind

    def build(self):
        super().build()
        if self.kind == "looks" and self.global_rank == 1:
            self.norm = float(self.gpt.blocks[0].qkv.weight.norm())
        if self.kind == "writes" and self.global_rank == 1:
            nn.init.zeros_(self.gpt.blocks[0].qkv.weight)
        if self.kind == "writes":
            self.norm = float(self.gpt.blocks[0].qkv.weight.sum())
            self.norms = [float(p.norm()) for p in self.gpt.blocks[1].parameters()]
        if self.kind == "raises" and self.global_rank == 1:
            raise LookupError("no such layer")
        if self.kind == "raises":
            float(self.gpt.blocks[0].qkv.weight.norm())


def _uneven(rank, world_size, kind):
    building._UNSHARDED_NUMEL = UNSHARDED_NUMEL
    seed_everything(7 + rank, verbose=False)
    module = UnevenGPT(kind, ranks=2, num_batches=1)
    trainer = make_trainer(settings(3))
    try:
        trainer.fit(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return arrays(module.state_dict())


def test_ranks_that_look_at_other_parameters_do_not_wait_for_each_other():
    first, second = run_ranks(2, _uneven, "looks", has_group=False)
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value, err_msg=name)


def test_values_that_differ_by_rank_are_an_error_on_every_rank():
    for text in run_ranks(2, _uneven, "writes", has_group=False):
        assert "different values on different ranks, first in Linear.weight of shape (384" in text


def test_an_exception_on_one_rank_ends_the_others_too():
    first, second = run_ranks(2, _uneven, "raises", has_group=False)
    assert second == "LookupError: no such layer"
    assert first.startswith("PeerAbortedError") or "RuntimeError" in first
