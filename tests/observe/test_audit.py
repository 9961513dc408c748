"""The callback Audit: silent in correct runs, and named differences in wrong ones."""

from __future__ import annotations

import random
import warnings
from functools import partial
from threading import Lock

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.plugins import LayerSync, MixedPrecision
from torch import nn

from lightning_zero import gathered
from lightning_zero.callbacks import Audit
from lightning_zero.engine import engine
from lightning_zero.optim.state_view import raw_states
from lightning_zero.strategy import engine_strategy
from tests.support.fitting import fit, fit_ranks, make_trainer, settings
from tests.support.models import (
    OPTIMIZERS,
    SCHEDULERS,
    ConvModule,
    FrozenModule,
    GANModule,
    GPTModule,
    MLPModule,
    TiedModule,
    UnusedModule,
)
from tests.support.ranks import run_ranks


class Corrupt(Callback):
    """Changes the engine when training begins: gradients of one bucket, or its average."""

    def __init__(self, factor, step=1):
        self.factor, self.step = factor, step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step != self.step:
            return
        grads = trainer.strategy.engine.buckets[-1].grads
        publish, factor = grads.publish, self.factor

        def corrupted(touched):
            if grads.main_grad is not None:
                grads.main_grad.mul_(factor)
            publish(touched)

        if "publish" not in vars(grads):
            grads.publish = corrupted


class ClipLess(Callback):
    """Clips to twice the norm that the Trainer was given."""

    def on_train_start(self, trainer, pl_module):
        engine = trainer.strategy.engine
        clip = engine.clip_grad_norm_
        engine.clip_grad_norm_ = lambda limit, *args, **kwargs: clip(2 * limit, *args, **kwargs)


def test_a_norm_that_is_clipped_to_another_value_is_found():
    options = {"gradient_clip_val": 0.01}
    text = text_of(lambda: run(settings(2), mlp, [ClipLess()], **options))
    assert "step 0, clipping: the gradient of net." in text


class ScaleState(Callback):
    """Changes optimizer states of rank 1 after a step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 2 and trainer.global_rank == 1:
            for state in raw_states(trainer.strategy.engine.optimizers[0]).values():
                state["exp_avg"].mul_(1.001)


def test_an_optimizer_state_that_differs_is_found():
    text = text_of(lambda: run(settings(2), mlp, [ScaleState()]))
    assert "step 1, step: exp_avg of net." in text
    assert "on rank 1" in text


class Normed(torch.optim.Optimizer):
    """SGD that is divided by the norm of all gradients, kept in a setting; as Prodigy's `d`."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "d": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        if grads:
            total = float(sum(grad.square().sum() for grad in grads).sqrt())
            for group in self.param_groups:
                group["d"] = total
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=group["lr"] / total)
        return loss


class NormedModule(MLPModule):
    def configure_optimizers(self):
        return Normed(self.parameters())


def audit(**options):
    return Audit(every_n_steps=2, against_data_parallel=3, **options)


def run(spec, factory, callbacks=(), **options):
    options = {"callbacks": [*callbacks, audit()]} | options
    return fit_ranks(2, spec, factory, options)


def text_of(call):
    with pytest.raises(AssertionError) as caught:
        call()
    assert "AuditError" in str(caught.value)
    return str(caught.value)


mlp = partial(MLPModule, ranks=2)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_gradient_scaled_in_one_bucket_is_found(stage):
    text = text_of(lambda: run(settings(stage, reduce_bucket_size=50), mlp, [Corrupt(1.001)]))
    assert "the engine and plain data parallel compute different values" in text
    assert "step 1, reduction: the gradient of net." in text


class SkipAverage(Callback):
    """Leaves out the average of gradients over replicas."""

    def on_train_start(self, trainer, pl_module):
        for bucket in trainer.strategy.engine.buckets:
            bucket.grads.issue_average = lambda: None


def test_a_skipped_average_is_found():
    options = {"sharding_group_size": 1}
    run(settings(2, **options), mlp)
    text = text_of(lambda: run(settings(2, **options), mlp, [SkipAverage()]))
    assert "step 0, reduction: the gradient of net." in text
    assert "with the engine" in text
    assert "with plain data parallel" in text


def test_a_sum_in_place_of_an_average_is_found():
    text = text_of(lambda: run(settings(3), mlp, [Corrupt(2.0, step=0)]))
    assert "step 0, reduction: the gradient of net." in text


def test_an_optimizer_with_a_global_setting_that_is_stepped_elementwise_is_found():
    factory = partial(NormedModule, ranks=2)
    text = text_of(lambda: run(settings(1, assume_elementwise=True), factory))
    assert "step 0, step: net." in text


class Estimating(torch.optim.SGD):
    """SGD that keeps a norm of all gradients in a setting, which changes no parameter yet."""

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.param_groups[0]["d"] = float(sum(grad.square().sum() for grad in grads))
        super().step()
        return loss


class EstimatingModule(MLPModule):
    def configure_optimizers(self):
        return Estimating(self.parameters(), lr=0.1)


def test_a_setting_that_is_computed_from_all_gradients_is_found():
    """Prodigy's parameters differ by less than a rounding error in its first steps."""
    factory = partial(EstimatingModule, ranks=2)
    text = text_of(lambda: run(settings(1, assume_elementwise=True), factory))
    assert "step 0, step: d of parameter group 0 on rank" in text


class ForgetScale(Callback):
    """Writes other parameters to the module on all ranks."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 1:
            with torch.no_grad():
                pl_module.net[0].weight.mul_(1.5)


def test_other_parameters_are_found_in_the_forward():
    text = text_of(lambda: run(settings(2), mlp, [ForgetScale()]))
    assert "step 1, forward: the loss" in text


class FlipOnRank1(Callback):
    """Flips a bit in a replicated parameter of rank 1."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 4 and trainer.global_rank == 1:
            bucket = trainer.strategy.engine.buckets[0]
            bucket.wait_for_unshard()  # else the all-gather overwrites it
            view = bucket.unsharded_params.views[0]
            view.detach().view(-1).view(torch.int32)[0] ^= 1


def test_a_flipped_bit_ends_training_on_all_ranks():
    def call():
        fit_ranks(
            2,
            settings(1),
            partial(mlp, num_batches=6),
            {"callbacks": [FlipOnRank1(), Audit(every_n_steps=4)]},
        )

    text = text_of(call)
    assert "audit in step 4: ranks hold different values" in text
    assert "parameter net." in text


def test_the_ranks_are_compared_when_training_ends():
    options = {"callbacks": [FlipOnRank1(), Audit(every_n_steps=3)]}
    text = text_of(lambda: fit_ranks(2, settings(1), mlp, options))
    assert "audit in step 4: ranks hold different values" in text


class ChangeOnRank1(Callback):
    """Changes a value of the Trainer on rank 1 in the second step."""

    def __init__(self, change):
        self.change = change

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 2 and trainer.global_rank == 1:
            self.change(trainer)


def draw(trainer):
    torch.rand(())


def advance_schedule(trainer):
    trainer.lr_scheduler_configs[0].scheduler.last_epoch += 1


def scale_up(trainer):
    trainer.strategy.precision_plugin.scaler._scale *= 2


@pytest.mark.default_cases("advance_schedule-scheduler last_epoch of StepLR 0")
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (draw, "generator of the CPU"),
        (advance_schedule, "scheduler last_epoch of StepLR 0"),
        pytest.param(scale_up, "loss scaler state", marks=pytest.mark.slow),
    ],
)
def test_a_value_of_the_trainer_that_differs_is_found(change, name):
    def call(callbacks):
        options = {"callbacks": [*callbacks, Audit(every_n_steps=2, rng=True)]}
        if change is scale_up:
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
        fit_ranks(2, settings(2), partial(mlp, scheduler="per step"), options)

    call([])
    text = text_of(lambda: call([ChangeOnRank1(change)]))
    assert f"audit in step 2: ranks hold different values:\n  {name}: rank 0 and rank 1" in text


def _fit_and_warn(rank, world_size):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callbacks = [FlipOnRank1(), Audit(every_n_steps=4, on_difference="warn")]
        outcome = fit(rank, world_size, settings(1), mlp, {"callbacks": callbacks})
    texts = [str(one.message) for one in caught if "audit in" in str(one.message)]
    return outcome.global_step, texts


def test_with_warn_a_difference_ends_nothing():
    (num_steps, texts), others = run_ranks(2, _fit_and_warn, has_group=False)
    assert (num_steps, others) == (4, (4, []))
    assert "ranks hold different values" in texts[0]


def test_an_interval_that_ends_between_steps_of_two_optimizers_is_audited():
    options = {"callbacks": [FlipOnRank1(), Audit(every_n_steps=3)]}
    text = text_of(lambda: fit_ranks(2, settings(1), partial(GANModule, ranks=2), options))
    assert "audit in step 4: ranks hold different values" in text


# ------------------------------------------------------------------------------------ silent cells

MODELS = {
    "gpt": GPTModule,
    "conv": ConvModule,
    "mlp": MLPModule,
    "tied": TiedModule,
    "frozen": FrozenModule,
    "unused": UnusedModule,
}


def cells():
    """Cells of the parity tables of tests/strategy: stage, settings, model and Trainer."""
    for stage in range(4):
        for model in MODELS:
            yield {"stage": stage}, model, {}, {"accumulate_grad_batches": 2}
        yield {"stage": stage}, "gpt", {}, {"gradient_clip_val": 0.05}
        yield {"stage": stage}, "gpt", {"optimizer": "sgd"}, {"precision": "bf16-mixed"}
    for stage in (1, 3):
        for optimizer in OPTIMIZERS:
            yield {"stage": stage}, "mlp", {"optimizer": optimizer}, {}
        for scheduler in SCHEDULERS:
            yield {"stage": stage}, "mlp", {"scheduler": scheduler}, {}
    for options in (
        {"reduce_bucket_size": 500},
        {"overlap_comm": False},
        {"overlap_step": True},
        {"offload_optimizer": "cpu"},
        {"offload_optimizer": {"device": "nvme", "nvme_path": "."}},
        {"sharding_group_size": 1},
    ):
        yield {"stage": 2} | options, "gpt", {}, {"accumulate_grad_batches": 2}


CELLS = list(cells())
FAST = [CELLS[0], CELLS[14], CELLS[30], CELLS[-2]]


def _fit_all(rank, world_size, chosen):
    found = []
    for spec, model, arguments, options in chosen:
        factory = partial(MODELS[model], ranks=world_size, num_batches=4, **arguments)
        callback = audit()
        outcome = fit(rank, world_size, spec, factory, options | {"callbacks": [callback]})
        found.append(len(outcome.losses))
    return found


@pytest.mark.slow
def test_the_audit_is_silent_in_some_cells():
    assert run_ranks(2, _fit_all, FAST, has_group=False) == [[4] * len(FAST)] * 2


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("part", range(6))
def test_the_audit_is_silent_in_the_parity_cells(part):
    assert len(CELLS) >= 50
    chosen = CELLS[part::6]
    found = run_ranks(2, _fit_all, chosen, has_group=False, timeout_s=300.0)
    assert found == [[4] * len(chosen)] * 2


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_comparison_works_in_double_precision(stage):
    run(settings(stage), mlp, precision="64-true")
    text = text_of(lambda: run(settings(stage), mlp, [Corrupt(1 + 1e-8)], precision="64-true"))
    assert "step 1, reduction: the gradient of net." in text


class DrawingModule(MLPModule):
    """Mixes samples with weights from NumPy and Python, as mixup does."""

    def part_loss(self, part, rank):
        weight = np.random.beta(1, 1) * random.random()
        return super().part_loss([weight * t + (1 - weight) * t.flip(0) for t in part], rank)


class EmptyingModule(MLPModule):
    """Scales its inputs in place, and takes its targets out of the batch."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return dict(zip("xy", batch, strict=True))

    def training_step(self, batch, batch_idx):
        return super().training_step([batch["x"].mul_(2.0), batch.pop("y")], batch_idx)


class CoolingModule(MLPModule):
    """Hooks set numbers and tensors with which it computes."""

    def on_train_start(self):
        self.weights = torch.tensor([1.0, 2.0, 3.0])

    def on_train_epoch_start(self):
        self.temperature = 0.5 + self.current_epoch

    def part_loss(self, part, rank):
        x, y = part
        self.temperature *= 0.9
        return ((self(x) / self.temperature - y).square() * self.weights).mean()


class CompiledModule(MLPModule):
    """A submodule is wrapped by torch.compile, which inserts `_orig_mod` into names."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.net[0] = torch.compile(self.net[0], backend="eager")


class LossModule(MLPModule):
    """Its training_step only computes the loss."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


class HookedModule(LossModule):
    """A hook of its own sets what training_step reads, and draws random numbers."""

    def on_train_batch_start(self, batch, batch_idx):
        self.factor = 1.0 + float(torch.rand(()))

    def training_step(self, batch, batch_idx):
        return self.factor * super().training_step(batch, batch_idx)


def compiled(**kwargs):
    return torch.compile(LossModule(**kwargs), backend="eager")


def _fit_beside(rank, world_size, factory, options):
    """Losses of a run with the audit, and of one without."""
    losses = []
    for callbacks in ([audit()], []):
        np.random.seed(rank)
        outcome = fit(rank, world_size, settings(3), factory, {"callbacks": callbacks} | options)
        losses.append(outcome.losses)
    return losses


@pytest.mark.default_cases("CoolingModule", "CompiledModule", "compiled")
@pytest.mark.parametrize(
    "model", [DrawingModule, EmptyingModule, CoolingModule, CompiledModule, HookedModule, compiled]
)
def test_the_audit_is_silent_and_changes_nothing_in_unusual_modules(model):
    factory = partial(model, ranks=2, num_batches=4)
    for audited, plain in run_ranks(2, _fit_beside, factory, {}, has_group=False):
        assert audited == plain


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


class Doubled(LayerSync):
    """Replaces a layer, as `sync_batchnorm=True` does, which needs a GPU."""

    def apply(self, model):
        model.net[0] = nn.Sequential(model.net[0], Double())
        return model

    def revert(self, model):
        model.net[0] = model.net[0][0]
        return model


def test_the_copy_has_the_layers_that_synchronize():
    run(settings(2), partial(mlp, num_batches=3), plugins=[Doubled()])


def _fit_too_short(rank, world_size):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(rank, world_size, settings(2), mlp, {"callbacks": [audit()], "max_steps": 2})
    return [str(one.message) for one in caught if "audit" in str(one.message)]


def test_a_comparison_that_has_not_ended_is_reported():
    texts, others = run_ranks(2, _fit_too_short, has_group=False)
    assert others == []
    assert len(texts) == 1
    assert "training ended after 2 of 3 steps" in texts[0]


def test_the_audit_is_silent_where_a_callback_sets_the_number_of_micro_batches():
    options = {"callbacks": [audit(), GradientAccumulationScheduler({0: 2})]}
    outcomes = fit_ranks(2, settings(2), partial(mlp, num_batches=4), options)
    assert [outcome.global_step for outcome in outcomes] == [2, 2]


class Unfreeze(BaseFinetuning):
    """Trains the last layer, and from the second epoch on the first one, too."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=1e-2)


class TrainableModule(MLPModule):
    def groups(self):
        return [p for p in self.parameters() if p.requires_grad]


def test_the_audit_is_silent_where_a_callback_adds_a_parameter_group():
    options = {"callbacks": [audit(), Unfreeze()], "max_epochs": 2, "limit_train_batches": 2}
    outcomes = fit_ranks(2, settings(2), partial(TrainableModule, ranks=2), options)
    assert [len(outcome.learning_rates) for outcome in outcomes] == [2, 2]


class CorruptFile(Callback):
    """Changes an element of rank 1 on its way into a checkpoint."""

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        if trainer.global_step != 2:
            return
        if trainer.strategy._saves_shards:
            if trainer.global_rank == 1:
                shards = trainer.strategy.engine.buckets[0].shards
                shards.values(0).view(-1).view(torch.int32)[0] ^= 1
        elif trainer.global_rank == 0:
            checkpoint["state_dict"]["net.0.weight"].view(-1).view(torch.int32)[-1] ^= 1


@pytest.mark.parametrize("checkpoint", ["full", pytest.param("sharded", marks=pytest.mark.slow)])
def test_a_checkpoint_that_differs_from_the_shards_is_found(checkpoint, tmp_path):
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    options = {"enable_checkpointing": True, "callbacks": [saver, Audit(every_n_steps=100)]}
    spec = settings(3, checkpoint=checkpoint)
    fit_ranks(2, spec, mlp, options)  # no difference
    options["callbacks"].insert(0, CorruptFile())
    text = text_of(lambda: fit_ranks(2, spec, mlp, options))
    assert "the checkpoint differs from the values that were saved" in text
    assert "of rank 1 differ from" in text


class CastModule(MLPModule):
    """Saves its parameters in 16 bits."""

    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {key: value.bfloat16() for key, value in state.items()}


@pytest.mark.parametrize("checkpoint", ["full", pytest.param("sharded", marks=pytest.mark.slow)])
def test_a_checkpoint_that_a_hook_has_cast_is_not_compared(checkpoint, tmp_path):
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    options = {"enable_checkpointing": True, "callbacks": [saver, Audit(every_n_steps=100)]}
    fit_ranks(2, settings(3, checkpoint=checkpoint), partial(CastModule, ranks=2), options)


class SaveLast(Callback):
    """Saves to the same path after each step; then rank 0 may delete the file."""

    def __init__(self, path, is_deleted=False):
        self.path, self.is_deleted = path, is_deleted

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.path)
        if self.is_deleted and trainer.is_global_zero:
            self.path.unlink()
        trainer.strategy.barrier()


def test_each_checkpoint_of_one_path_is_compared(tmp_path):
    options = {"callbacks": [CorruptFile(), SaveLast(tmp_path / "last.ckpt"), Audit(100)]}
    text = text_of(lambda: fit_ranks(2, settings(3, checkpoint="full"), mlp, options))
    assert "of rank 1 differ from" in text


class ClampingModule(MLPModule):
    """Clamps its weights after a batch, so after a checkpoint; saves a bias in float16."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.05, 0.05)

    def on_save_checkpoint(self, checkpoint):
        state_dict = checkpoint["state_dict"]
        if isinstance(state_dict["net.2.bias"], torch.Tensor):
            state_dict["net.2.bias"] = state_dict["net.2.bias"].half()


def _fit_clamping(rank, world_size, options, path):
    saver = ModelCheckpoint(path, "{step}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [EMAWeightAveraging(decay=0.5), Audit(100), saver]
    arguments = {"callbacks": callbacks, "enable_checkpointing": True}
    factory = partial(ClampingModule, ranks=2)
    fit(rank, world_size, settings(3) | options, factory, arguments)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"checkpoint": "sharded"}, marks=pytest.mark.slow)]
)
def test_a_checkpoint_is_compared_with_the_values_that_were_saved(options, tmp_path):
    run_ranks(2, _fit_clamping, options, tmp_path, has_group=False)


def _fit_without_files(rank, world_size, path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saver = SaveLast(path, is_deleted=True)
        options = {"callbacks": [saver, Audit(100)]}
        fit(rank, world_size, settings(3, checkpoint="full"), mlp, options)
    return [str(one.message) for one in caught if "was not compared" in str(one.message)]


def test_a_checkpoint_that_is_missing_is_left_out_with_a_warning(tmp_path):
    texts, others = run_ranks(2, _fit_without_files, tmp_path / "last.ckpt", has_group=False)
    assert "rank 0 does not find it" in texts[0]
    assert not others


def _fit_again(rank, world_size, path):
    torch.manual_seed(0)
    module = mlp()
    trainer = make_trainer(settings(2), callbacks=[Audit(100)])
    trainer.fit(module)
    trainer.save_checkpoint(path)
    with torch.no_grad():
        module.net[0].weight.add_(1)  # after the save
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    return trainer.global_step


def test_a_checkpoint_that_was_saved_before_a_fit_is_not_compared_in_it(tmp_path):
    path = tmp_path / "before.ckpt"
    assert run_ranks(2, _fit_again, path, has_group=False) == [8, 8]


def test_a_comparison_with_skipped_steps_is_refused():
    with pytest.raises(AssertionError, match='does not support on_nonfinite="skip"'):
        run(settings(1, on_nonfinite="skip"), mlp)


class IteratorModule(MLPModule):
    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


class LockedModule(MLPModule):
    def __init__(self):
        super().__init__()
        self.lock = Lock()


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (IteratorModule, "a training_step that takes a batch"),
        (LockedModule, "failed with TypeError: cannot pickle '_thread.lock' object; make"),
    ],
)
def test_a_module_that_cannot_be_compared_is_an_error_before_training(module, text):
    with pytest.raises(ValueError, match=text):
        make_trainer(settings(1), devices=1, callbacks=[audit()]).fit(module())


@pytest.mark.parametrize(
    "arguments",
    [{"every_n_steps": -1}, {"against_data_parallel": True}, {"on_difference": "raise"}],
)
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Audit(**arguments)


class SwapAverage(Callback):
    """Puts the weights of the first step in place of the others, as an average, and leaves them."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with gathered(pl_module):
            weights = [parameter.detach().clone() for parameter in pl_module.parameters()]
        if trainer.global_step == 0:
            self.average = weights
        elif trainer.global_step == 2:
            with torch.no_grad():
                for parameter, value in zip(pl_module.parameters(), self.average, strict=True):
                    parameter.copy_(value)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_an_average_that_is_not_swapped_back_is_found(stage):
    text = text_of(lambda: run(settings(stage), mlp, [SwapAverage()]))
    assert "step 2, forward: the loss" in text
    assert "with plain data parallel" in text


class SharedModule(MLPModule):
    """Two parameters share their memory."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.other = torch.nn.Linear(8, 13, bias=False)
        self.other.weight = torch.nn.Parameter(self.net[0].weight.detach())

    def forward(self, x):
        return self.net(x) + self.other(x).tanh().mean()


def _fit_without_ties(rank, world_size, is_tied):
    if not is_tied:
        for module in (engine, engine_strategy):
            module.tie_shared = lambda *args: []
    options = {"callbacks": [audit()]}
    return fit(rank, world_size, settings(2), partial(SharedModule, ranks=2), options).losses


@pytest.mark.slow
def test_a_lost_tie_of_parameters_that_share_memory_is_found():
    run_ranks(2, _fit_without_ties, True, has_group=False)
    text = text_of(lambda: run_ranks(2, _fit_without_ties, False, has_group=False))
    assert "compute different values" in text
    assert "with plain data parallel" in text
