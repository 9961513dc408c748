"""The promised programs of docs/limits.md are equal to one process; the withdrawn ones an error."""

from __future__ import annotations

import copy
import pickle
import re
import time

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import OffloadConfig, ZeroConfig
from lightning_zero.tensors.sharded import ShardedTensorError
from tests.support.core_programs import GRADIENTS, LOOKS, SWAPS, WRITES, lerp, momentum
from tests.support.core_runs import Net, PlainRun, ZeroRun, compared, difference
from tests.support.core_writes import UNCOUNTED, WRITES_BY_MOMENT
from tests.support.fitting import make_trainer
from tests.support.warm import run_ranks
from tests.support.withdrawn import WITHDRAWN

CPU = {"offload_optimizer": "cpu", "offload_param": "cpu"}
FILES = dict.fromkeys(
    ("offload_optimizer", "offload_param"),
    OffloadConfig("nvme", nvme_path=".", max_in_cpu_bytes=0),
)
HALF = {"param_dtype": torch.bfloat16}
CELLS = {
    "stage 1": (2, {"stage": 1}),
    "stage 1, bf16": (2, {"stage": 1, **HALF}),
    "stage 3": (2, {"stage": 3}),
    "stage 3, bf16": (2, {"stage": 3, **HALF}),
    "stage 3, CPU": (2, {"stage": 3, **CPU}),
    "stage 0": (2, {"stage": 0}),
    "stage 1, CPU": (2, {"stage": 1, "offload_optimizer": "cpu"}),
    "stage 2": (2, {"stage": 2}),
    "stage 3, one rank": (1, {"stage": 3}),
    "stage 3, three ranks": (3, {"stage": 3}),
    "stage 3, small buckets": (2, {"stage": 3, "reduce_bucket_size": 20}),
    "stage 3, files": (2, {"stage": 3, **FILES}),
    "stage 3, two groups": (4, {"stage": 3, "sharding_group_size": 2}),
}
TABLES = {
    "swaps": SWAPS,
    "writes": WRITES,
    "looks": LOOKS,
    "gradients": GRADIENTS,
    **WRITES_BY_MOMENT,
}


def _cell(rank, world_size, options, tables):
    """By name of a program of the tables of these names, what is wrong with it."""
    config = ZeroConfig(**options)
    return {
        name: text for table in tables for name, text in compared(config, TABLES[table]).items()
    }


@pytest.mark.default_cases(  # each table where parameters are replicated, and where sharded
    *("swaps-stage 1, bf16", "writes-stage 1", "looks-stage 1", "gradients-stage 1, bf16"),
    *("swaps-stage 3", "writes-stage 3, CPU", "looks-stage 3", "gradients-stage 3, bf16"),
)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("table", ["swaps", "writes", "looks", "gradients"])
def test_what_users_do_to_parameters_and_gradients_is_what_one_process_does(cell, table):
    size, options = CELLS[cell]
    assert run_ranks(size, _cell, options, [table], timeout_s=240) == [{}] * size


# ---------------------------------------------------------------- no write is lost


@pytest.mark.default_cases("stage 1, bf16", "stage 3")
@pytest.mark.parametrize("cell", CELLS)
def test_no_way_of_writing_to_a_parameter_is_lost(cell):
    size, options = CELLS[cell]
    tables = ["written before use", "written between steps"]
    if options["stage"] < 3:  # in stage 3 a parameter is a shard between steps
        tables.append("written between steps in other ways")
    assert run_ranks(size, _cell, options, tables, timeout_s=240) == [{}] * size


@pytest.mark.default_cases("stage 3")
@pytest.mark.parametrize("cell", CELLS)
def test_a_write_to_a_parameter_that_a_backward_needs_is_torchs_error(cell):
    size, options = CELLS[cell]
    for found in run_ranks(size, _cell, options, ["written after use"], timeout_s=240):
        assert set(found) == set(TABLES["written after use"]) - UNCOUNTED, found
        for text in found.values():
            assert "modified by an inplace operation" in text, text


@pytest.mark.default_cases("stage 1", "stage 3", "stage 3, bf16")
@pytest.mark.parametrize("cell", CELLS)
def test_data_set_between_forward_and_backward_is_as_in_torch_or_an_error_that_names_it(cell):
    size, options = CELLS[cell]
    for found in run_ranks(size, _cell, options, ["set before backward"]):
        if options["stage"] < 3:
            assert found == {}
            continue
        (text,) = found.values()
        assert re.match(r"RuntimeError: parameter\.data of blocks\.1\.weight was set between", text)


# ---------------------------------------------------------------- withdrawn programs

TENSORS = {
    "p": lambda p: p,
    "p.data": lambda p: p.data,
    "p.detach()": lambda p: p.detach(),
    "p.grad": lambda p: p.grad,
}


def _error(call, tensor, title, limit_s):
    """What is wrong with the error that `call` raises; None if nothing is."""
    role, way = ("p.grad", "full_grad(") if tensor == "p.grad" else ("p.data", "gathered(")
    name, start = title.partition(",")[0], time.monotonic()
    try:
        call()
        return "nothing was raised"
    except ShardedTensorError as error:
        text = str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if time.monotonic() - start > limit_s:
        return f"{time.monotonic() - start} s"
    expected = f"{name!r} on {role} of parameter blocks.1.weight, which is sharded, called at "
    line = text.removeprefix(expected).partition(": ")[0]
    has_line = text.startswith(expected) and re.search(
        r"/(withdrawn|test_core_programs)\.py:\d+$", line
    )
    return None if has_line and way in text else text


@torch.no_grad()
def _errors(run, tensors, limit_s):
    weight = run.net.blocks[1].weight
    found = {
        (tensor, title): _error(lambda: call(TENSORS[tensor](weight)), tensor, title, limit_s)  # noqa: B023
        for tensor in tensors
        for title, call in WITHDRAWN.items()
    }
    return {key: text for key, text in found.items() if text is not None}


def _withdrawn(rank, world_size, options, tensors):
    torch.manual_seed(0)
    config, plain = ZeroConfig(**options), PlainRun(Net())
    run = ZeroRun(copy.deepcopy(plain.net), config)
    for each in (plain, run):
        each.train()
        each.backward()
    wrong = _errors(run, tensors, 1)
    for each in (plain, run):
        each.step()
        each.backward()
    if rank == 0:  # alone
        wrong |= {("alone", *key): text for key, text in _errors(run, tensors, 1).items()}
    for each in (plain, run):
        each.step()
        each.train()
    found = difference(run.end(), plain.end())
    run.engine.close()
    return wrong if found is None else {**wrong, "in the end": found}


@pytest.mark.parametrize(
    ("stage", "tensors"), [(1, ["p.grad"]), (3, list(TENSORS))], ids=["stage 1", "stage 3"]
)
def test_calls_that_need_all_elements_are_one_error_at_once_and_change_nothing(stage, tensors):
    """On all ranks, and then on rank 0 alone."""
    assert run_ranks(2, _withdrawn, {"stage": stage}, tensors) == [{}, {}]


# ---------------------------------------------------------------- what rank 0 does alone

ALONE = {
    "norm": lambda net: net.blocks[0].weight.norm(),
    "state dict": lambda net: net.blocks[0].state_dict(),
    "copy": lambda net: copy.deepcopy(net.blocks[0]),
    "pickle": lambda net: pickle.dumps(net.blocks[0]),
    "write": lambda net: net.blocks[0].weight.data.mul_(2),
}


def _alone(rank, world_size, title):
    run = ZeroRun(Net(), ZeroConfig(stage=3))
    run.backward()
    start = time.monotonic()
    try:
        if rank == 0:
            ALONE[title](run.net)
        run.step()
        run.train()
        run.train()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "nothing was raised", 0


@pytest.mark.default_cases("norm", "state dict", "write")
@pytest.mark.parametrize("title", ALONE)
def test_what_rank_0_does_alone_is_an_error_on_all_with_parameter_line_and_remedy(title):
    """Rank, call and line first, then the remedy."""
    for rank, (text, seconds) in enumerate(run_ranks(2, _alone, title)):
        first, second, *rest = text.splitlines()
        call = r"rank 0 (reached|wrote to) .*blocks\.0\.\w+, \S*test_core_programs\.py:\d+"
        own = ": this rank reached .+" if rank else ""
        assert re.fullmatch(rf"{call}; not every rank did{own}\.", first), text
        assert "`with lightning_zero.gathered(" in second, text
        assert len(rest) < 28, text
        assert seconds < 10


# ---------------------------------------------------------------- in the hooks of a Trainer


class Halved(nn.Module):
    def forward(self, weight):
        return weight * 0.5


class Hooked(LightningModule):
    """Looks at itself and averages itself wherever Lightning calls it between steps."""

    def __init__(self):
        super().__init__()
        self.net, self.last = Net(), nn.Linear(6, 6)
        parametrize.register_parametrization(self.last, "weight", Halved())
        self.losses, self.seen = [], []

    def step(self, batch, index):
        return self.net(self.last(batch[0]))

    def training_step(self, batch, index):
        loss = self.step(batch, index)
        self.losses.append(float(loss))
        return loss

    validation_step = step

    def data(self):
        return DataLoader(TensorDataset(torch.linspace(-1, 1, 96).view(16, 6)), batch_size=4)

    train_dataloader = val_dataloader = data

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def on_train_batch_end(self, *args):
        lerp(self.net, None)
        self.seen.append([float(p.norm()) for p in self.net.parameters()])
        self.log("norm", self.net.scale.norm())

    def on_before_optimizer_step(self, optimizer):
        self.seen.append([p.detach().mean().item() for p in self.net.blocks.parameters()])

    def on_validation_start(self):
        self.kept = copy.deepcopy(self.net.blocks.state_dict())

    def on_validation_epoch_end(self):
        momentum(self.net, None)
        self.seen.append(self.net.blocks[0].weight.detach().abs().max().item())

    def on_train_epoch_end(self):
        self.net.blocks.load_state_dict(self.kept)
        plain = copy.deepcopy(self.net).cpu().eval()
        self.seen.append(plain(torch.ones(2, 6)).item())

    def on_train_end(self):
        parametrize.remove_parametrizations(self.last, "weight")
        with torch.no_grad():
            self.last.bias.set_(torch.ones(6))


def _fit(rank, world_size, strategy):
    seed_everything(1, verbose=False)
    module = Hooked()
    options = {"limit_val_batches": 1.0, "max_epochs": 2, "num_sanity_val_steps": 1}
    trainer = make_trainer(strategy, **options)
    trainer.fit(module)
    state = {name: value.tolist() for name, value in module.state_dict().items()}
    return module.losses, module.seen, state


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_what_hooks_of_a_module_do_between_steps_is_what_they_do_under_ddp(stage):
    ours = run_ranks(2, _fit, {"stage": stage}, has_group=False)
    theirs = run_ranks(2, _fit, "ddp", has_group=False)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
