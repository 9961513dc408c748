"""The callback NonfiniteTrace: names the module in which a NaN begins, and changes no value."""

from __future__ import annotations

import random
import warnings
from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
import torch
from torch import nn

from lightning_zero import NonfiniteGradientError
from lightning_zero.callbacks import NonfiniteTrace
from lightning_zero.observe.replica import allocated, copy_of
from tests.support.fitting import fit, make_trainer, settings
from tests.support.models import MLPModule, TiedModule
from tests.support.ranks import run_ranks


class Bad(nn.Module):
    """The identity; where its input begins with a large value, its gradient is NaN."""

    def forward(self, x):
        if x.detach().flatten()[0].abs() < 1e6:
            return x
        return x + (x * 0).sqrt()


class BadModule(MLPModule):
    """Has random numbers and buffers; one micro-batch of one rank has a NaN in backward."""

    def __init__(self, bad_batch=1, bad_rank=1, **kwargs):
        super().__init__(**kwargs)
        self.bad_batch, self.bad_rank = bad_batch, bad_rank
        body = [nn.Linear(8, 13), nn.BatchNorm1d(13), nn.Dropout(0.5), nn.Tanh()]
        self.net = nn.Sequential(*body, nn.Linear(13, 3), Bad())

    def training_step(self, batch, batch_idx):
        self.log("random", torch.rand(()))
        loss = super().training_step(batch, batch_idx)
        is_bad = batch_idx == self.bad_batch and self.global_rank == self.bad_rank
        return loss + self.net[-1](self.net[4].bias + 1e9).sum() * 0 if is_bad else loss


def _trace(rank, world_size, spec, options, folder, is_traced=True):
    trace = NonfiniteTrace(folder) if is_traced else None
    options = {"callbacks": [trace] if trace else [], "limit_train_batches": 4} | options
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcome = fit(rank, world_size, spec, partial(BadModule, ranks=2), options)
        except NonfiniteGradientError as error:
            outcome = f"{error}"
    texts = [str(one.message) for one in caught if "trace of" in str(one.message)]
    return outcome, trace and trace.last_trace, texts


def traced(spec, folder, **options):
    return run_ranks(2, _trace, spec, options, str(folder), has_group=False)


@pytest.mark.default_cases("warn-3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("policy", ["warn", "skip"])
def test_the_module_is_named_and_training_goes_on_bit_by_bit(stage, policy, tmp_path):
    spec = settings(stage, on_nonfinite=policy, reduce_bucket_size=50)
    found = traced(spec, tmp_path)
    text = "backward, in module net.5 (Bad): the gradient of its input is not finite"
    for rank, (_, last_trace, texts) in enumerate(found):
        assert last_trace.startswith(text)
        assert len(texts) == (rank == 0)
    assert "on rank 1, step 1, micro-batch 0" in found[0][2][0]
    plain = run_ranks(2, _trace, spec, {}, str(tmp_path), False, has_group=False)
    for (ours, *_), (theirs, *_) in zip(found, plain, strict=True):
        np.testing.assert_array_equal(ours.losses, theirs.losses)
        for name, value in theirs.state.items():
            np.testing.assert_array_equal(ours.state[name], value, err_msg=name)


def test_one_process_computes_it_again_from_the_file(tmp_path):
    (_, text, _), _ = traced(settings(2, on_nonfinite="stop"), tmp_path)
    (path,) = Path(tmp_path).iterdir()
    assert str(path) in text
    state = torch.load(path, weights_only=True)
    assert (state["step"], state["micro_batch"], state["arguments"][1]) == (1, 0, 1)
    module = BadModule(bad_rank=0)
    assert set(state["values"]) == set(module.state_dict())
    module.trainer = make_trainer("auto", devices=1)
    origin = "backward, in module net.5 (Bad): the gradient of its input is not finite"
    assert NonfiniteTrace.reproduce(str(path), module).startswith(origin)


@pytest.mark.default_cases("bf16-true-3")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_a_micro_batch_in_another_precision_is_computed_again(stage, precision, tmp_path):
    found = traced(settings(stage, on_nonfinite="skip"), tmp_path, precision=precision)
    origin = "backward, in module net.5 (Bad): the gradient of its input is not finite"
    assert found[1][1].startswith(origin)
    (path,) = Path(tmp_path).iterdir()
    module = BadModule(bad_rank=0)
    module.trainer = make_trainer("auto", devices=1)
    assert NonfiniteTrace.reproduce(str(path), module).startswith(origin)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_an_earlier_micro_batch_of_the_step_is_traced(stage, tmp_path):
    spec = settings(stage, on_nonfinite="skip")
    found = traced(spec, tmp_path, accumulate_grad_batches=3, limit_train_batches=3)
    assert "on rank 1, step 0, micro-batch 1" in found[0][2][0]
    assert found[1][1].startswith("backward, in module net.5 (Bad)")
    (path,) = Path(tmp_path).iterdir()
    assert torch.load(path, weights_only=True)["arguments"][1] == 1


class RandomlyBad(BadModule):
    """Random numbers of torch, NumPy and Python decide whether a gradient is NaN."""

    def training_step(self, batch, batch_idx):
        self.bad_batch = -1
        drawn = float(torch.rand(())), random.random(), float(np.random.rand())
        if all(number < 0.4 for number in drawn):
            self.bad_batch = batch_idx
        return super().training_step(batch, batch_idx)


def _trace_randomly_bad(rank, world_size, folder):
    trace = NonfiniteTrace(folder)
    spec = settings(2, on_nonfinite="skip")
    factory = partial(RandomlyBad, ranks=2, num_batches=64)
    fit(rank, world_size, spec, factory, {"callbacks": [trace]})
    return trace.last_trace


def test_a_micro_batch_is_computed_again_with_its_random_numbers(tmp_path):
    for text in run_ranks(2, _trace_randomly_bad, str(tmp_path), has_group=False):
        assert text.startswith("backward, in module net.5 (Bad)")


class UnevenlyZeroed(BadModule):
    """Takes no step in its first batch, and rank 1 does not zero its gradients then."""

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        return optimizer.step(closure) if batch_idx else closure()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if (batch_idx, self.global_rank) != (1, 1):
            optimizer.zero_grad()


def _trace_unevenly_zeroed(rank, world_size, stage, folder):
    trace = NonfiniteTrace(folder)
    spec = settings(stage, on_nonfinite="skip")
    fit(rank, world_size, spec, partial(UnevenlyZeroed, ranks=2), {"callbacks": [trace]})
    return trace.last_trace


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_ranks_that_count_steps_differently_trace_together(stage, tmp_path):
    for text in run_ranks(2, _trace_unevenly_zeroed, stage, str(tmp_path), has_group=False):
        assert text.startswith("backward, in module net.5 (Bad)")


class Uncopyable(BadModule):
    """Its copy has a parameter less."""

    def __deepcopy__(self, memo):
        made = BadModule(ranks=2)
        del made.net[4].bias
        return made


def _trace_one(rank, world_size, folder, model):
    trace = NonfiniteTrace(folder)
    spec = settings(3, on_nonfinite="skip")
    outcome = fit(rank, world_size, spec, partial(model, ranks=2), {"callbacks": [trace]})
    return trace.last_trace, outcome.global_step


def test_a_module_that_cannot_be_copied_is_reported_and_no_rank_waits(tmp_path):
    for text, _ in run_ranks(2, _trace_one, str(tmp_path), Uncopyable, has_group=False):
        assert text.startswith("the module cannot be copied: KeyError: 'net.4.bias'")
        assert "step-1-rank-1.pt" in text


class Measuring(BadModule):
    """Needs values in `setup`, which a copy on the meta device does not have."""

    def setup(self, stage):
        self.scale = torch.ones(3).sum().item()


class Locked(BadModule):
    """Cannot be copied, as a module that holds a file or a connection."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.lock = Lock()


@pytest.mark.parametrize(
    ("model", "why"), [(Measuring, "cannot be called on meta tensors"), (Locked, "_thread.lock")]
)
def test_a_module_that_cannot_be_copied_when_training_begins_is_trained(model, why, tmp_path):
    for text, num_steps in run_ranks(2, _trace_one, str(tmp_path), model, has_group=False):
        assert text.startswith("the module cannot be copied: ")
        assert why in text
        assert "step-1-rank-1.pt" in text
        assert num_steps == 4


class Gathering(BadModule):
    """Its loss needs the other ranks: by the strategy, or by torch.distributed."""

    is_raw = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if not self.is_raw:
            return loss + self.all_gather(loss.detach()).mean()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        return loss + mean


class RawGathering(Gathering):
    is_raw = True


@pytest.mark.parametrize("model", [Gathering, RawGathering])
def test_a_step_that_communicates_is_not_computed_again_and_no_rank_waits(model, tmp_path):
    for text, num_steps in run_ranks(2, _trace_one, str(tmp_path), model, has_group=False):
        assert "training_step communicates between ranks" in text
        assert "NonfiniteTrace.reproduce" in text
        assert num_steps == 4


class Emptying(BadModule):
    """Takes its targets out of the batch."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return dict(zip("xy", batch, strict=True))

    def training_step(self, batch, batch_idx):
        return super().training_step([batch["x"], batch.pop("y")], batch_idx)


def test_a_step_that_takes_values_out_of_its_batch_is_computed_again(tmp_path):
    found = run_ranks(2, _trace_one, str(tmp_path), Emptying, has_group=False)
    assert found[1][0].startswith("backward, in module net.5 (Bad)")


class Pairs(list):
    """A batch that cannot be pickled."""

    def __reduce__(self):
        raise TypeError("no pickle")


class PairsModule(BadModule):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return Pairs(batch)


def test_a_batch_that_cannot_be_pickled_leaves_no_file(tmp_path):
    found = run_ranks(2, _trace_one, str(tmp_path), PairsModule, has_group=False)
    assert found[0][0].startswith("backward, in module net.5 (Bad)")
    assert "its file was not written: TypeError: no pickle" in found[0][0]
    assert not list(Path(tmp_path).iterdir())


class Compiled(BadModule):
    """Submodules are wrapped by torch.compile, which inserts `_orig_mod` into names."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        for index in (0, 5):
            self.net[index] = torch.compile(self.net[index], backend="eager")


def test_compiled_modules_are_computed_again_without_compilation(tmp_path):
    found = run_ranks(2, _trace_one, str(tmp_path), Compiled, has_group=False)
    assert found[1][0].startswith("backward, in module net.5 (Bad)")
    (path,) = Path(tmp_path).iterdir()
    assert set(torch.load(path, weights_only=True)["values"]) == set(BadModule().state_dict())


def test_a_file_that_cannot_be_written_is_in_the_text_and_the_module_is_named_nevertheless(
    tmp_path,
):
    (tmp_path / "file").touch()  # no folder can be made there
    found = traced(settings(2, on_nonfinite="skip"), tmp_path / "file" / "folder")
    for _, text, _ in found:
        assert text.startswith("backward, in module net.5 (Bad)")
        assert "its file was not written: NotADirectoryError" in text


def test_a_copy_with_memory_keeps_ties_and_leaves_the_one_without():
    module = TiedModule()
    module.trainer = make_trainer("auto", devices=1)
    replica = copy_of(module, on_meta=True)
    made = allocated(replica, module, torch.device("cpu"))
    assert made.last.weight is made.first.weight
    assert made.first.weight.device.type == "cpu"
    assert all(parameter.is_meta for parameter in replica.parameters())


class Manual(MLPModule):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "policy", "text"),
    [
        (MLPModule, None, "needs the reports of the guard, got on_nonfinite=None"),
        (Manual, "stop", "needs automatic optimization"),
    ],
)
def test_what_it_cannot_trace_is_an_error_before_training(module, policy, text):
    trainer = make_trainer(settings(2, on_nonfinite=policy), callbacks=[NonfiniteTrace()])
    with pytest.raises(ValueError, match=text):
        trainer.fit(module())


def test_a_number_of_traces_below_one_is_an_error():
    with pytest.raises(ValueError, match="max_traces must be an integer of at least 1, got 0"):
        NonfiniteTrace(max_traces=0)
