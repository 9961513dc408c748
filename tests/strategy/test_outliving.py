"""Sharded tensors that a script keeps after a run of the Trainer are used as under DDP."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging

from tests.support.fitting import arrays, make_trainer, run_once, settings
from tests.support.models import MLPModule
from tests.support.warm import run_ranks

KEPT_GLOBALLY = {}


class Keeper(Callback):
    """Keeps tensors of each kind, and has an average that is swapped in for tests."""

    def __init__(self):
        self.kept, self.shadow = {}, {}

    def state_dict(self):
        return {"shadow": self.shadow, "kept": self.kept}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for name, p in pl_module.named_parameters():
            self.kept[f"{name} grad"] = p.grad.detach().clone()

    def on_train_batch_end(self, trainer, pl_module, *args):
        for name, p in pl_module.named_parameters():
            if name not in self.shadow:
                self.shadow[name] = p.detach().clone()
            self.shadow[name].mul_(0.5).add_(p.detach(), alpha=0.5)

    def on_train_end(self, trainer, pl_module):
        for name, p in pl_module.named_parameters():
            copied = p.detach().clone()
            state = trainer.optimizers[0].state[p]["exp_avg"]
            self.kept |= {
                f"{name} copy": copied,
                f"{name} view": copied.view(-1),
                f"{name} detached": p.data.clone().detach(),
                f"{name} double": (p.detach() * 2).double(),
                f"{name} sign": p.detach() > 0,
                f"{name} state": state.clone(),
            }
            KEPT_GLOBALLY[name] = pl_module.hparams[name] = p.detach() - 1

    def on_test_start(self, trainer, pl_module):
        for name, p in pl_module.named_parameters():
            now = p.detach().clone()
            p.data.copy_(self.shadow[name])
            self.shadow[name] = now

    on_test_end = on_test_start


def _without_shards(value):
    """The plain tensors of a checkpoint's entry, as arrays."""
    return {name: np.array(tensor.float().cpu()) for name, tensor in value.items()}


def _use_afterwards(rank, world_size, spec, options):
    KEPT_GLOBALLY.clear()
    seed_everything(7, verbose=False)
    keeper, module = Keeper(), MLPModule(ranks=world_size)
    average = EMAWeightAveraging(decay=0.5)
    trainer = make_trainer(spec, callbacks=[keeper, average], **options)
    trainer.fit(module)
    kept = {**keeper.kept, **{f"{n} shadow": v for n, v in keeper.shadow.items()}}
    kept |= {f"{name} global": value for name, value in KEPT_GLOBALLY.items()}
    assert {type(value) for value in kept.values()} == {torch.Tensor}
    found = [_without_shards(kept)]
    if rank == 0:  # alone
        file = io.BytesIO()
        torch.save([copy.deepcopy(kept), keeper.kept["net.0.weight copy"].tolist()], file)
        file.seek(0)
        found.append(_without_shards(torch.load(file, weights_only=False)[0]))
    keeper.kept["net.0.weight copy"].zero_()
    assert not keeper.kept["net.0.weight view"].any()
    trainer.save_checkpoint("late.ckpt")
    found.append(_without_shards(_saved("late.ckpt", spec)))
    found.append(trainer.test(module, verbose=False)[0])
    found.append(_without_shards(keeper.shadow))
    trainer.save_checkpoint("later.ckpt")
    second = make_trainer(spec, callbacks=[keeper], **options)
    second.fit(module)  # the shadow goes on
    found += [_without_shards(keeper.shadow), arrays(module.state_dict()), list(module.losses)]
    second.save_checkpoint("second.ckpt")
    found.append(_without_shards(_saved("second.ckpt", spec)))
    return found


def _saved(path, spec):
    if spec != "ddp" and spec.get("checkpoint") == "sharded":
        from lightning_zero import open_checkpoint

        saved = open_checkpoint(path, weights_only=False)
    else:
        saved = torch.load(path, weights_only=False)
    return saved["callbacks"]["Keeper"]["shadow"]


SPECS = {
    "stage 1": settings(1),
    "stage 2": settings(2, overlap_step=True),
    "stage 3": settings(3),
    "stage 3, overlapped": settings(3, overlap_step=True),
    "stage 3, sharded": settings(3, checkpoint="sharded"),
    "in files": settings(3, offload_optimizer="nvme", offload_param="cpu", checkpoint="full"),
    "offloaded": settings(3, offload_optimizer="cpu", offload_param="cpu", checkpoint="full"),
}


@pytest.mark.default_cases("stage 3")
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_kept_tensors_are_saved_tested_pickled_and_used_in_a_second_fit_as_under_ddp(spec):
    ours = run_ranks(2, _use_afterwards, spec, {}, has_group=False)
    reference = run_once(2, _use_afterwards, "ddp", {})
    for mine, theirs in zip(ours, reference, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            if isinstance(other, list):
                np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
                continue
            assert one.keys() == other.keys()
            for name, value in other.items():
                np.testing.assert_allclose(one[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
