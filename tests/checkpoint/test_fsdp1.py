"""Checkpoints that Lightning's `FSDPStrategy` (FSDP1) has written resume here."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

from examples.gpt import Block
from tests.checkpoint.test_readers import SavingAtEnd
from tests.support.fitting import make_strategy, make_trainer, run_once, settings
from tests.support.models import GPTModule
from tests.support.ranks import run_ranks


class FSDPOnCPU(FSDPStrategy):
    """FSDP1 on CPU ranks, which Lightning does not support.

    There `tensor.cpu()` copies nothing, so torch's full states would be views of buffers that it
    uses again.
    """

    def _setup_model(self, model):
        return FullyShardedDataParallel(
            model,
            sharding_strategy=self.sharding_strategy,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )

    def lightning_module_state_dict(self):
        if self._state_dict_type == "sharded":
            return super().lightning_module_state_dict()
        full = StateDictType.FULL_STATE_DICT
        with FullyShardedDataParallel.state_dict_type(self.model, full, FullStateDictConfig()):
            return self.model.state_dict()

    def optimizer_state(self, optimizer):
        copy = torch.Tensor.cpu
        torch.Tensor.cpu = lambda tensor: copy(tensor).clone()
        try:
            return super().optimizer_state(optimizer)
        finally:
            torch.Tensor.cpu = copy


class GroupedGPT(GPTModule):
    """Its optimizer has two groups, so that parameters have another order there."""

    def groups(self):
        named = dict(self.named_parameters())  # those of FSDP1 have one dim
        biases = [parameter for name, parameter in named.items() if name.endswith("bias")]
        others = [parameter for name, parameter in named.items() if not name.endswith("bias")]
        return [{"params": biases, "weight_decay": 0.0}, {"params": others}]


def _train(rank, world_size, strategy, max_epochs, source, target):
    """Trains, and returns the losses of the last epoch."""
    seed_everything(7 if source is None else 8, verbose=False)
    if isinstance(strategy, str):
        strategy = FSDPOnCPU(auto_wrap_policy={Block}, state_dict_type=strategy)
    else:
        strategy = make_strategy(settings(strategy))
    module = GroupedGPT(ranks=world_size, scheduler="per step")
    callbacks = [SavingAtEnd(target)] if target else []
    trainer = make_trainer("auto", max_epochs=max_epochs, callbacks=callbacks, strategy=strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, ckpt_path=source)
    return module.losses[-module.num_batches :]


@pytest.mark.default_cases("sharded-3")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
def test_a_checkpoint_of_fsdp1_resumes_and_trains_on_as_uninterrupted(
    state_dict_type, stage, tmp_path
):
    path = str(tmp_path / "fsdp1.ckpt")
    run_ranks(2, _train, state_dict_type, 1, None, path, has_group=False)
    losses = run_ranks(2, _train, stage, 2, path, None, has_group=False)
    expected = run_once(2, _train, 3, 2, None, None)
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-6)
