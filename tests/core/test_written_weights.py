"""Weights that the user writes between steps are trained on and saved, also beside a master."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks.batch_size_finder import BatchSizeFinder
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_zero import Engine, ZeroConfig, gathered
from tests.support.fitting import make_trainer, settings
from tests.support.warm import run_ranks


def _find_batch_size(rank, world_size, stage):
    trainer = make_trainer(
        settings(stage), callbacks=[BatchSizeFinder(max_trials=2, steps_per_trial=1)], max_epochs=1
    )

    class Sized(BoringModel):
        batch_size = 2

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.ones(64, 32), batch_size=self.batch_size)

        def val_dataloader(self):
            return []

    module = Sized()
    trainer.fit(module)
    return module.batch_size


def _find_batch_sizes(rank, world_size):
    return [_find_batch_size(rank, world_size, stage) for stage in (1, 2, 3)]


@pytest.mark.shows("BatchSizeFinder")
def test_the_batch_size_finder_works_on_one_device():
    (found,) = run_ranks(1, _find_batch_sizes, has_group=False)
    assert min(found) > 2


def _small(stage):
    """Two buckets, and one weight that is used twice."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    )
    module[1].weight = module[0].weight
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return module, Engine(module, [optimizer], ZeroConfig(stage=stage, reduce_bucket_size=8))


def _values(module):
    with gathered(module):
        return [p.detach().clone() for p in module.parameters()]


def _write_from(rank, world_size, stage):
    module, engine = _small(stage)
    before = _values(module)
    last = world_size - 1
    with torch.no_grad(), gathered(module[1], writeback=True, from_rank=last):
        if rank == last:
            module[1].weight.fill_(3)  # is module[0].weight, too
        module[1].bias.fill_(0.5)  # the same on every rank
    weight, first, second, *rest = _values(module)
    assert weight.unique().tolist() == [3]
    assert second.unique().tolist() == [0.5]
    assert torch.equal(first, before[1])
    assert all(map(torch.equal, rest, before[3:]))
    with gathered(module[2].bias, writeback=True, from_rank=last):
        if rank == last:
            module[2].bias.data = torch.ones(2)
    assert torch.equal(_values(module)[-1], torch.ones(2))
    with torch.no_grad(), gathered(module, writeback=True, from_rank=last):
        with gathered(module[2], writeback=True, from_rank=last):
            if rank == last:
                module[2].bias.fill_(7)
        module[1].bias.fill_(0.25)
    _, _, second, _, last_bias = _values(module)
    assert (second.unique().tolist(), last_bias.unique().tolist()) == ([0.25], [7])
    engine.backward(module(torch.ones(2, 4)).sum())
    engine.step()  # from the values that were written, on every rank
    states = engine.comm.control.gather_objects([v.tolist() for v in _values(module)])
    assert all(state == states[0] for state in states)
    engine.close()


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_from_rank_writes_for_all_ranks(stage):
    run_ranks(2, _write_from, stage)
    if stage == 3:
        run_ranks(1, _write_from, stage)


def _write_differently(rank, world_size, stage):
    module, engine = _small(stage)
    before = _values(module)

    def refuse(message, write, from_rank=0):
        writing = gathered(module, writeback=True, from_rank=from_rank)
        with pytest.raises(ValueError, match=message), torch.no_grad(), writing:
            write()
        assert all(map(torch.equal, _values(module), before))

    def lone_write():
        module[2].bias.fill_(1.0)  # the same on every rank, and dropped with the rest
        if rank == 1:
            module[1].weight.add_(1)

    refuse(r"values than those of rank 0, .*: 0.weight on rank 1\. .*from_rank", lone_write)
    refuse(r"of rank 1, .*: 0.weight on rank 0\.", lambda: module[0].weight.add_(rank + 1), 1)
    refuse(r"different from_rank: \[0, 1\] by rank", lambda: None, rank)
    refuse(r"from_rank of 0 to 1, got 2", lambda: None, 2)
    engine.close()


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_changes_that_would_be_lost_are_an_error_on_all_ranks_and_change_nothing(stage):
    run_ranks(2, _write_differently, stage)
