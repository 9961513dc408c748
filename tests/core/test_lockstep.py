"""Ranks that use the module a different number of times: evaluation and generation."""

from __future__ import annotations

import re
import time
from contextlib import nullcontext
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import lightning_zero
from lightning_zero.health.failures import DESYNC_HINT
from tests.support import warm
from tests.support.fitting import arrays, make_trainer, run_once, settings
from tests.support.loops import batch, build, engine_for
from tests.support.models import GPTModule
from tests.support.ranks import RankError, run_ranks
from tests.support.waits import Pace

STAGES = [1, pytest.param(2, marks=pytest.mark.slow), 3]


class Ids(Dataset):
    """`num_samples` rows of 9 ids; the length is known."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return [torch.randint(64, (9,), generator=torch.Generator().manual_seed(index))]


class EndlessIds(IterableDataset):
    """As `Ids`, without a known length."""

    def __init__(self, num_samples):
        self.rows = Ids(num_samples)

    def __iter__(self):
        return (self.rows[index] for index in range(len(self.rows)))


class RaggedModule(GPTModule):
    """Rank r evaluates 1 + 2r batches, 3 - 2r of a second loader, and predicts 2r."""

    logs_each_batch = False

    def val_dataloader(self):
        rank = self.global_rank
        return [DataLoader(Ids(1 + 2 * rank)), DataLoader(EndlessIds(3 - 2 * rank))]

    test_dataloader = val_dataloader

    def predict_dataloader(self):
        return DataLoader(EndlessIds(2 * self.global_rank))

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.part_loss(batch, 0)
        self.log("val", loss, on_epoch=True, sync_dist=dataloader_idx == 0)
        self.log("num", 1.0, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        if self.logs_each_batch:
            self.log("each", loss, on_step=True, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.gpt(batch[0][:, :8])

    def on_validation_epoch_end(self):
        with lightning_zero.gathered(self.gpt.head):
            assert self.gpt.head.weight.dim() == 2


@pytest.mark.slow
@pytest.mark.shows("evaluation with different numbers of batches")
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_with_different_numbers_of_batches_evaluate_as_under_ddp(stage):
    ours = run_ranks(2, _evaluate_ragged, settings(stage), has_group=False)
    reference = run_once(2, _evaluate_ragged, "ddp")
    for (metrics, predictions, state), (expected, outputs, final) in zip(
        ours, reference, strict=True
    ):
        assert metrics == pytest.approx(expected, rel=1e-6)
        assert len(predictions) == len(outputs)
        for one, other in zip(predictions, outputs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        for name, value in final.items():
            np.testing.assert_allclose(state[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


def _evaluate_ragged(rank, world_size, spec):
    seed_everything(7, verbose=False)
    module = RaggedModule(ranks=world_size, num_batches=2)
    options = {"use_distributed_sampler": False, "limit_val_batches": 1.0}
    trainer = make_trainer(spec, val_check_interval=1, num_sanity_val_steps=2, **options)
    trainer.fit(module)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for run in (trainer.validate, trainer.test):
        for index, results in enumerate(run(module, verbose=False)):
            metrics |= {f"{run.__name__} {index} {name}": v for name, v in results.items()}
    predictions = [p.numpy().copy() for p in trainer.predict(module)]
    assert "on_run_end" not in vars(trainer.validate_loop)
    return metrics, predictions, arrays(module.state_dict())


class EachBatchModule(RaggedModule):
    logs_each_batch = True


class EvenModule(EachBatchModule):
    """The same number of batches on each rank."""

    def val_dataloader(self):
        return [DataLoader(Ids(3)), DataLoader(EndlessIds(2))]


@pytest.mark.slow
def test_a_metric_synchronised_in_each_batch_needs_equal_numbers_of_batches():
    results = run_ranks(2, _validate, settings(3), EvenModule, has_group=False)
    assert results == run_once(2, _validate, "ddp", EvenModule)
    start = time.monotonic()
    call = r"rank 1 reached a mean over ranks of float32\[\], \S+/test_lockstep\.py:\d+"
    with pytest.raises(RankError, match=f"{call}; not every rank did") as raised:
        run_ranks(2, _validate, settings(3), EachBatchModule, has_group=False)
    assert "did not return" not in str(raised.value)
    assert time.monotonic() - start < 30


class EmptyModule(RaggedModule):
    """Rank 1 has no batch of the second loader."""

    is_synchronized = False

    def val_dataloader(self):
        return [DataLoader(Ids(2)), DataLoader(EndlessIds(3 - 3 * self.global_rank))]

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.part_loss(batch, 0)
        self.log("val", loss, sync_dist=self.is_synchronized or dataloader_idx == 0)


class EmptySynchronisedModule(EmptyModule):
    is_synchronized = True


def test_a_rank_without_a_batch_is_an_error_only_where_metrics_would_wait_for_it():
    results = warm.run_ranks(2, _validate, settings(3), EmptyModule, has_group=False)
    assert results == run_once(2, _validate, "ddp", EmptyModule)
    with pytest.raises(
        RankError, match=r"rank 0 \['validation_step.val.1'\], rank 1 \[\]"
    ) as raised:
        run_ranks(2, _validate, settings(3), EmptySynchronisedModule, has_group=False)
    assert "did not return" not in str(raised.value)


class SizedEmptyModule(RaggedModule):
    """Rank 1 has loaders of known length zero."""

    def val_dataloader(self):
        return DataLoader(Ids(3 - 3 * self.global_rank))

    test_dataloader = predict_dataloader = val_dataloader

    def validation_step(self, batch, batch_idx):
        self.log("val", self.part_loss(batch, 0))

    test_step = validation_step


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_whose_sized_loader_is_empty_serves_the_others(stage):
    first, second = run_ranks(2, _evaluate_empty, settings(stage), has_group=False)
    ((expected, predictions),) = run_once(1, _evaluate_empty, "auto")
    assert first == (pytest.approx(expected, rel=1e-5), pytest.approx(predictions, rel=1e-5))
    assert second == ({}, [])


class DifferentiatingModule(GPTModule):
    """Runs a backward in every batch of validation, and a collective within it."""

    automatic_optimization = False

    def __init__(self, num_batches, **kwargs):
        super().__init__(**kwargs)
        self.batches = num_batches  # by rank
        self.norms = []
        self.gpt.blocks[1].register_forward_hook(self.watch)

    def watch(self, block, args, output):
        output.register_hook(self.count)

    def count(self, gradient):
        count = torch.ones(())
        dist.all_reduce(count)
        assert count == dist.get_world_size()

    def val_dataloader(self):
        first = 10 * self.global_rank
        return DataLoader(Subset(Ids(20), range(first, first + self.batches[self.global_rank])))

    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            self.manual_backward(self.part_loss(batch, 0))
        self.norms.append(float(self.gpt.head.weight.grad.norm()))
        self.gpt.zero_grad()


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_in_each_batch_of_an_evaluation_needs_equal_numbers_of_batches(stage):
    for norms, text, seconds in run_ranks(2, _differentiate, stage, has_group=False):
        assert norms == pytest.approx(_norms_of_means(2), rel=1e-5)
        assert "rank 1 reached a backward" in text
        assert seconds < 10


def _differentiate(rank, world_size, stage):
    results = []
    for num_batches in ((2, 2), (1, 2)):
        seed_everything(7, verbose=False)
        module = DifferentiatingModule(num_batches, ranks=world_size)
        options = {"use_distributed_sampler": False, "limit_val_batches": 1.0}
        trainer = make_trainer(settings(stage), inference_mode=False, **options)
        start = time.monotonic()
        with nullcontext() if not results else pytest.raises(RuntimeError) as raised:
            trainer.validate(module, verbose=False)
        results.append(module.norms)
    return results[0], str(raised.value), time.monotonic() - start


def _norms_of_means(num_batches):
    """Norms of the gradients of the mean loss over two ranks, in one process."""
    seed_everything(7, verbose=False)
    module, norms = GPTModule(ranks=2), []
    for index in range(num_batches):
        rows = [Ids(20)[10 * rank + index][0][None] for rank in range(2)]
        module.zero_grad()
        (sum(module.part_loss([row], 0) for row in rows) / 2).backward()
        norms.append(float(module.gpt.head.weight.grad.norm()))
    return norms


def _evaluate_empty(rank, world_size, spec):
    seed_everything(7, verbose=False)
    module = SizedEmptyModule(ranks=2, num_batches=2)
    options = {"use_distributed_sampler": False, "limit_val_batches": 0.67}
    trainer = make_trainer(spec, num_sanity_val_steps=2, **options)
    trainer.fit(module)
    metrics = {n: float(v) for n, v in trainer.callback_metrics.items() if n != "rising"}
    for run in (trainer.validate, trainer.test):
        for result in run(module, verbose=False):
            metrics |= {f"{run.__name__} {name}": value for name, value in result.items()}
    return metrics, [float(p.sum()) for p in trainer.predict(module)]


def _validate(rank, world_size, spec, factory):
    seed_everything(7, verbose=False)
    module = factory(ranks=world_size)
    trainer = make_trainer(spec, use_distributed_sampler=False, limit_val_batches=1.0)
    results = trainer.validate(module, verbose=False)
    return [{name: round(value, 5) for name, value in result.items()} for result in results]


def generate(gpt, ids, num_tokens):
    """Greedy; one forward for each token."""
    for _ in range(num_tokens):
        ids = torch.cat([ids, gpt(ids[:, -8:])[:, -1:].argmax(-1)], dim=1)
    return ids


class GeneratingModule(RaggedModule):
    """Generates 2 + 3r tokens on rank r: in training, prediction and hooks; on rank 0 alone."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.texts = []

    def generate(self):
        with lightning_zero.uneven_calls(self.gpt):
            assert not torch.is_grad_enabled()
            text = generate(self.gpt, torch.arange(4)[None], 2 + 3 * self.global_rank)
        self.texts.append(text.tolist())

    def training_step(self, batch, batch_idx):
        self.generate()
        loss = super().training_step(batch, batch_idx)
        self.log("rank", float(self.global_rank), sync_dist=True)
        self.generate()
        return loss

    def on_train_batch_end(self, *args):
        self.generate()
        with lightning_zero.uneven_calls(self):
            if self.trainer.is_global_zero:
                self.texts.append(self(torch.arange(4)[None]).argmax(-1).tolist())

    def forward(self, ids):
        return self.gpt(ids)

    def predict_step(self, batch, batch_idx):
        self.generate()
        return generate(self.gpt, batch[0][:, :4], 3 - 2 * self.global_rank)


@pytest.mark.default_cases("3")
@pytest.mark.shows("generation, `uneven_calls`")
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_generate_different_numbers_of_tokens_anywhere_as_under_ddp(stage):
    ours = warm.run_ranks(2, _generate, settings(stage), has_group=False)
    reference = run_once(2, _generate, "ddp")
    for (texts, losses, predictions), (expected, expected_losses, tokens) in zip(
        ours, reference, strict=True
    ):
        assert texts == expected
        assert predictions == tokens
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)


def _generate(rank, world_size, spec):
    seed_everything(7, verbose=False)
    module = GeneratingModule(ranks=world_size, num_batches=3)
    trainer = make_trainer(spec, use_distributed_sampler=False)
    trainer.fit(module)
    texts = [p.tolist() for p in trainer.predict(module)]
    module.generate()  # no engine holds it any more
    return module.texts, module.losses, texts


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_an_error_on_all_ranks_ends_the_context_and_they_can_go_on(stage):
    start = time.monotonic()
    losses, texts = zip(*run_ranks(3, _fail_inside, stage, (0, 1, 2)), strict=True)
    assert time.monotonic() - start < 30
    assert losses[0] == losses[1] == losses[2]
    assert texts == ("out of luck",) * 3


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_an_error_on_one_rank_ends_the_context_on_all(stage):
    start = time.monotonic()
    found = run_ranks(3, _fail_inside, stage, (1,))
    assert time.monotonic() - start < 30
    cause = "rank 1 raised ArithmeticError: out of luck"
    texts = [f"rank {rank} stops because {cause}" for rank in range(3)]
    assert found == [(None, texts[0]), (None, "out of luck"), (None, texts[2])]


def _fail_inside(rank, world_size, stage, failing):
    Pace()
    module, optimizer = build()
    engine = engine_for(module, [optimizer], stage)
    caught = None
    try:
        with lightning_zero.uneven_calls(module):
            generate(module.gpt, torch.arange(4)[None], 1 + (rank if len(failing) == 1 else 0))
            if rank in failing:
                raise ArithmeticError("out of luck")
            generate(module.gpt, torch.arange(4)[None], 2 * rank)
    except (ArithmeticError, RuntimeError) as error:
        caught = str(error)
    if len(failing) < world_size:
        return None, caught
    for _ in range(2):
        engine.backward(module(batch(0, 0)))
        engine.step()
        engine.zero_grad()
    with lightning_zero.uneven_calls(module):
        loss = [float(module(batch(0, 0))) for _ in range(rank)]
    loss = float(module(batch(0, 0)).detach())
    engine.close()
    return loss, caught


class FailingInsideModule(GeneratingModule):
    def training_step(self, batch, batch_idx):
        with lightning_zero.uneven_calls(self):
            generate(self.gpt, torch.arange(4)[None], 2 + self.global_rank)
            if self.global_rank == 1 and batch_idx == 1:
                raise ArithmeticError("out of luck")
        return super().training_step(batch, batch_idx)


class FailingInValidationModule(RaggedModule):
    """Rank 1 fails in its last batch, when rank 0 has none left."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 2 and self.global_rank == 1:
            raise ArithmeticError("out of luck")
        super().validation_step(batch, batch_idx, dataloader_idx)


@pytest.mark.slow
@pytest.mark.parametrize(
    "factory",
    [FailingInsideModule, pytest.param(FailingInValidationModule, marks=pytest.mark.slow)],
)
def test_an_error_on_one_rank_ends_fit_on_all(factory):
    start = time.monotonic()
    with pytest.raises(RankError, match="ArithmeticError: out of luck") as raised:
        run_ranks(2, _fit, settings(3, timeout=timedelta(seconds=20)), factory, has_group=False)
    assert "did not return" not in str(raised.value)
    assert time.monotonic() - start < 20


def _fit(rank, world_size, spec, factory):
    trainer = make_trainer(spec, use_distributed_sampler=False, limit_val_batches=1.0)
    trainer.fit(factory(ranks=world_size, num_batches=3))


class Onlooker(Callback):
    """Rank 0 alone reads a parameter at the first call of one hook."""

    def __init__(self, hook, look):
        setattr(self, hook, self._look)
        self.look = look

    def _look(self, trainer, module, *args):
        if trainer.is_global_zero:
            self.look(module)


def _norm(module):
    module.gpt.head.weight.detach().norm()


def _state(module):
    module.state_dict()


HOOKS = ["on_sanity_check_end", "on_train_batch_start", "on_train_epoch_end", "on_train_end"]
LOOKS = [
    ("on_validation_epoch_end", _norm),
    *(pytest.param(hook, _norm, marks=pytest.mark.slow) for hook in HOOKS),
    pytest.param("on_validation_end", _state, marks=pytest.mark.slow),
    pytest.param("on_before_optimizer_step", _state, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("hook", "look"), LOOKS)
def test_one_rank_that_looks_at_weights_gets_an_error_with_the_remedy_and_the_others_end(
    hook, look
):
    first, second = run_ranks(2, _fit_beside, hook, look, has_group=False)
    for text, own in ((first[0], ""), (second[0], ": this rank reached .+")):
        happened, cure = text.splitlines()[:2]
        call = r"rank 0 reached p.data\.\w+\(\) of gpt\.\w+\.weight, \S+\.py:\d+"
        assert re.fullmatch(rf"{call}; not every rank did{own}\.", happened), text
        assert cure == DESYNC_HINT
    assert max(first[1], second[1]) < 10


def _fit_beside(rank, world_size, hook, look):
    callbacks = [Onlooker(hook, look)]
    options = {"num_sanity_val_steps": 1, "limit_val_batches": 1.0, "callbacks": callbacks}
    trainer = make_trainer(settings(3), use_distributed_sampler=False, **options)
    module = RaggedModule(ranks=world_size, num_batches=3)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        trainer.fit(module)
    return str(raised.value), time.monotonic() - start
