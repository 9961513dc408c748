"""A module in a checkpoint, a pickle or a deep copy is the plain, full module, as under DDP."""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle

import pytest
import torch
import torch.fx
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import Engine, ZeroConfig, load_from_checkpoint
from lightning_zero.tensors.guarded import GuardedParameter
from tests.support.fitting import make_trainer
from tests.support.warm import run_ranks


class Scaled(nn.Parameter):
    """A parameter class of the user's own."""


class CopiedByItself(nn.Module):
    """Copies its attributes one by one, as many modules do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x)

    def __deepcopy__(self, memo):
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        for key, value in vars(self).items():
            copied.__dict__[key] = copy.deepcopy(value, memo)
        return copied


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.BatchNorm1d(6))
        self.traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(6, 6), nn.ReLU()))
        self.copied = CopiedByItself()
        self.head = nn.Linear(6, 6, bias=False)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.head.weight
        self.scale = Scaled(torch.tensor([1.5]))
        self.scale.note = "a user's own"
        self.body.register_forward_hook(doubled)

    def forward(self, x):
        return self.tied(self.head(self.copied(self.traced(self.body(x)))) * self.scale)


def doubled(module, args, output):
    return 2 * output


def assert_plain(copied, reference, values):
    """Asserts that `copied` equals a copy of a plain module with `values`."""
    assert type(copied) is type(reference)
    assert copied.head.weight is copied.tied.weight
    names = [name for name, _ in reference.named_parameters()]
    assert [name for name, _ in copied.named_parameters()] == names
    for part, other in zip(copied.modules(), reference.modules(), strict=True):
        assert set(vars(part)) == set(vars(other))
        for key, value in vars(other).items():
            if "_hooks" in key:
                assert len(getattr(part, key) or ()) == len(value or ()), key
    for name, parameter in copied.named_parameters():
        expected = reference.get_parameter(name)
        assert type(parameter) is type(expected)
        assert vars(parameter) == vars(expected)
        assert (parameter.dtype, parameter.requires_grad) == (
            expected.dtype,
            expected.requires_grad,
        )
        assert torch.equal(parameter.detach(), values[name]), name
    loss = copied(torch.ones(3, 6)).sum()
    loss.backward()
    assert copied.scale.grad is not None


def through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "copied": copy.deepcopy,
    "saved": through_file,
    "pickled": lambda value: pickle.loads(pickle.dumps(value)),
    "in a list": lambda value: copy.deepcopy([value, 1])[0],
}


def _copy(rank, world_size, options):
    torch.manual_seed(0)
    net = Net()
    plain = {way: make(net) for way, make in WAYS.items()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = Engine(net, [optimizer], ZeroConfig(**options))
    engine.backward(net(torch.ones(4, 6) * (1 + torch.arange(4.0)[:, None])).sum())
    engine.step()
    copies = {way: make(net) for way, make in WAYS.items()}
    net.eval()
    before = net.head.weight.detach().norm().item()
    with torch.no_grad():
        net(torch.ones(1, 6))
    net.train()
    engine.close()
    values = {name: p.detach().clone() for name, p in net.named_parameters()}
    assert not any(isinstance(p, GuardedParameter) for p in net.parameters())
    for way, copied in copies.items():
        assert_plain(copied, plain[way], values)
    assert net.head.weight.norm().item() == pytest.approx(before)


CELLS = [
    {"stage": 1},
    {"stage": 3},
    pytest.param({"stage": 2}, marks=pytest.mark.slow),
    pytest.param({"stage": 3, "activation_checkpointing": [nn.Linear]}, marks=pytest.mark.slow),
    pytest.param({"stage": 3, "offload_param": "cpu", "offload_optimizer": "cpu"},
                 marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("options", CELLS)
def test_a_copy_or_a_pickle_of_a_wrapped_module_is_plain_and_full(options):
    run_ranks(2, _copy, options)


# ---------------------------------------------------------------- in checkpoints


class Template(LightningModule):
    """As lightning-hydra-template's: modules and partials are hyperparameters."""

    def __init__(self, net, optimizer, extra=None):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def train_dataloader(self):
        data = torch.linspace(-1, 1, 96).view(16, 6)
        return DataLoader(TensorDataset(data), batch_size=4)

    def configure_optimizers(self):
        return self.hparams.optimizer(params=self.parameters())


def _save(rank, world_size, strategy, options):
    torch.manual_seed(0)
    net = Net()
    reference = through_file(net)
    extra = {"nested": [net.body, {"scale": net.scale}]}
    module = Template(net, functools.partial(torch.optim.SGD, lr=0.1), extra)
    folder = os.path.join(os.getcwd(), "saved")
    callback = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = make_trainer(
        strategy, callbacks=[callback], enable_checkpointing=True, max_steps=2, **options
    )
    trainer.fit(module)
    trainer.save_checkpoint("after.ckpt")
    trainer.strategy.barrier()
    for path in (callback.best_model_path, "after.ckpt"):
        loaded = load_from_checkpoint(Template, path, weights_only=False, map_location="cpu")
        for name, parameter in module.named_parameters():
            assert torch.equal(loaded.get_parameter(name), parameter), (path, name)
        hparams = torch.load(os.path.join(path, "meta.pt") if os.path.isdir(path) else path,
                             weights_only=False)["hyper_parameters"]  # fmt: skip
        saved = hparams["net"]
        values = {name: p.detach() for name, p in module.net.named_parameters()}
        assert hparams["extra"]["nested"][0] is saved.body
        assert hparams["extra"]["nested"][1]["scale"] is saved.scale
        assert_plain(saved, reference, values)


SAVED = [
    ("ddp", {}),
    ({"stage": 3, "checkpoint": "full"}, {}),
    ({"stage": 3, "checkpoint": "sharded"}, {}),
    ({"stage": 1, "checkpoint": "full"}, {}),
    ({"stage": 1, "checkpoint": "sharded"}, {}),
    ({"stage": 2}, {"precision": "bf16-mixed"}),
    ({"stage": 3}, {"precision": "bf16-mixed"}),
]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param(*case, marks=() if number == 1 else pytest.mark.slow)
        for number, case in enumerate(SAVED)
    ],
)
def test_a_module_among_the_hyperparameters_is_saved_plain_and_full(strategy, options):
    run_ranks(2, _save, strategy, options, has_group=False)
