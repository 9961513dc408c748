"""Modules on the meta device get memory unit by unit, and values by initializing themselves."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn

from examples.gpt import GPT, GPTConfig
from lightning_zero import Engine, OffloadConfig, ZeroConfig, load_from_checkpoint, load_weights
from lightning_zero.comm.communicator import Communicator
from tests.support import ranks
from tests.support.cells import SHARDED_STAGE
from tests.support.fitting import arrays, make_trainer, settings
from tests.support.models import MLPModule, Recorder, SquareBlocks
from tests.support.storage import live_storage_bytes, return_freed_memory
from tests.support.warm import run_ranks

CPU = torch.device("cpu")
STAGES = [1, 2, 3]


class Scale(nn.Module):
    """A parameter and a buffer that it initializes itself, and an inner module."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.empty(width))
        self.register_buffer("offset", torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.scale)
        nn.init.uniform_(self.offset)
        nn.init.zeros_(self.inner.bias)  # of the inner module, which is initialized before

    def forward(self, x):
        return self.inner(x) * self.scale + self.offset


class Net(nn.Module):
    """Tied weights, buffers, and a module whose reset method has another name."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(7, 8)
        self.blocks = nn.Sequential(*(Scale(8) for _ in range(3)))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.blocks(self.tokens(ids))
        x = x + self.attention(x, x, x)[0]
        return self.head(self.norm(x.mean(1)))


def on_meta(factory):
    with torch.device("meta"):
        return factory()


def _values_by_stage(rank, world_size):
    found = {}
    for stage in [0, *STAGES]:
        for param_dtype in (None, torch.bfloat16):
            module = on_meta(Net)
            torch.manual_seed(3 + rank)
            config = ZeroConfig(stage=stage, param_dtype=param_dtype)
            engine = Engine(module, config=config, device=CPU)
            engine.close()
            assert module.head.weight is module.tokens.weight
            found[stage, param_dtype] = arrays(module.state_dict())
    return found


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("world_size", [1, 2])
def test_values_are_those_of_construction_in_every_stage_and_on_every_rank(world_size):
    torch.manual_seed(3)
    expected = arrays(Net().state_dict())
    for of_rank in run_ranks(world_size, _values_by_stage):
        for key, state in of_rank.items():
            assert list(state) == list(expected), key
            for name, value in state.items():
                assert value.dtype == expected[name].dtype, (key, name)
                np.testing.assert_array_equal(value, expected[name], err_msg=f"{name} in {key}")


class Lone(nn.Module):
    """A parameter and a buffer that nothing initializes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(3))


class Forgetful(Scale):
    """Initializes one tensor of two."""

    def reset_parameters(self):
        nn.init.normal_(self.scale)


def test_a_module_that_cannot_initialise_itself_is_named():
    module = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Lone(), Lone()))
    match = r"1 \(Lone: weight, table\); 2 \(Lone: weight, table\)\. Define reset_parameters"
    with pytest.raises(ValueError, match=match):
        Engine(module, device=CPU)


def test_a_module_that_leaves_a_tensor_unset_is_named():
    module = on_meta(lambda: nn.Sequential(Forgetful(4)))
    with pytest.raises(ValueError, match=r"module 0 \(Forgetful\) .* has left offset without"):
        Engine(module, device=CPU)


def test_a_tensor_that_is_no_parameter_is_named():
    module = on_meta(lambda: nn.Sequential(nn.Linear(2, 2)))
    module[0].table = torch.zeros(3, device="meta")
    with pytest.raises(ValueError, match=r"attribute table of module 0 \(Linear\) is a tensor"):
        Engine(module, device=CPU)


def test_a_module_all_on_meta_needs_a_device():
    with pytest.raises(ValueError, match=r"Engine\(\.\.\., device="):
        Engine(on_meta(Net))


class Family(nn.Module):
    """Initializes its inner modules, as Hugging Face's models do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), Lone())
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, Lone):
            nn.init.ones_(module.weight)
            module.table.copy_(torch.arange(3))


def test_an_enclosing_module_initialises_inner_modules_by_init_weights():
    module = on_meta(Family)
    torch.manual_seed(3)
    Engine(module, device=CPU).close()
    torch.manual_seed(3)
    expected = Family().state_dict()
    for name, value in module.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_reset_parameters_that_a_script_has_assigned_decides_alone():
    module = on_meta(Family)
    first, _ = module.layers
    first.reset_parameters = lambda: [nn.init.constant_(p, 5) for p in first.parameters()]
    Engine(module, device=CPU).close()
    assert torch.equal(first.weight, torch.full((3, 3), 5.0))


def test_tensors_with_values_keep_them():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    weight = module[1].weight
    values = weight.detach().clone()
    module[1].bias = nn.Parameter(torch.empty(3, device="meta"))
    Engine(module, device=CPU).close()
    assert module[1].weight is weight
    assert torch.equal(weight, values)
    assert module[1].bias.abs().max() <= 3**-0.5


# ---------------------------------------------------------------- the same objects


class MetaMLP(MLPModule):
    """On the meta device, with hooks and attributes on its parameters."""

    def __init__(self, **kwargs):
        with torch.device("meta"):
            super().__init__(**kwargs)
        self.counts = [0, 0]
        weight = self.net[0].weight
        weight.is_mine = True
        weight.register_hook(lambda _: self.count(0))
        weight.register_post_accumulate_grad_hook(lambda _: self.count(1))
        self.objects = list(self.parameters())

    def count(self, index):
        self.counts[index] += 1


class InitMLP(MLPModule):
    """Built in `configure_model`, in the way that Lightning's documentation shows."""

    def __init__(self, **kwargs):
        Recorder.__init__(self, **kwargs)
        self.net = None
        self.num_built = 0

    def configure_model(self):
        if self.net is not None:
            return
        self.num_built += 1
        with self.trainer.init_module(empty_init=True):
            self.net = nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.Linear(13, 3))


def _train(rank, world_size, cases):
    found = []
    for spec, factory, kwargs in cases:
        seed_everything(7, verbose=False)
        module = factory(ranks=world_size, **kwargs)
        trainer = make_trainer(spec)
        trainer.fit(module)
        found.append((list(module.losses), arrays(module.state_dict())))
        if isinstance(module, MetaMLP):
            assert module.counts == [4, 4]
            assert module.net[0].weight.is_mine
            held = [p for g in trainer.optimizers[0].param_groups for p in g["params"]]
            for objects in (list(module.parameters()), held):
                assert {id(p) for p in objects} == {id(p) for p in module.objects}
        if isinstance(module, InitMLP):
            trainer.validate(module, verbose=False)
            make_trainer(spec).fit(module)
            assert module.num_built == 1
    return found


@pytest.mark.default_cases("1")
@pytest.mark.shows("parameters on the meta device, `init_module(empty_init=True)`")
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_from_meta_equals_training_from_the_same_values(world_size):
    stages = STAGES if world_size == 2 else [1, 3]
    makes = [
        (optimizer, spec) for optimizer in ("adamw", "adagrad") for spec in map(settings, stages)
    ]
    makes += [("adamw", settings(3, offload_optimizer="cpu", offload_param="cpu"))]
    cases = []
    for optimizer, spec in makes:
        factories = [MetaMLP, InitMLP] if optimizer == "adamw" else [MetaMLP]
        cases += [(spec, factory, {"optimizer": optimizer}) for factory in factories]
    reference = [("ddp", MLPModule, {"optimizer": key}) for key in ("adamw", "adagrad")]
    for of_rank in run_ranks(world_size, _train, reference + cases, has_group=False):
        expected = dict(zip(("adamw", "adagrad"), of_rank[:2], strict=True))
        for (spec, _, kwargs), (losses, state) in zip(cases, of_rank[2:], strict=True):
            other_losses, other_state = expected[kwargs["optimizer"]]
            np.testing.assert_allclose(losses, other_losses, rtol=1e-6, err_msg=str(spec))
            for name, value in state.items():
                np.testing.assert_allclose(value, other_state[name], rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- memory

MODEL = GPTConfig(vocab_size=512, context=8, width=192, num_layers=5, num_heads=6)


def _peak(rank, world_size):
    """Peak bytes of live storages while the engine is built, and bytes afterwards."""
    model = on_meta(lambda: GPT(MODEL))
    gc.collect()
    gc.freeze()
    gc.disable()
    before = live_storage_bytes()
    seen = []
    broadcast = Communicator.broadcast_

    def watched(comm, tensor):
        seen.append(live_storage_bytes())
        return broadcast(comm, tensor)

    Communicator.broadcast_ = watched
    engine = Engine(model, config=ZeroConfig(stage=3), device=CPU)
    rest = live_storage_bytes()
    assert len(seen) == len(engine.buckets) == MODEL.num_layers + 1
    return max(seen) - before, rest - before


def test_one_unit_is_unsharded_at_a_time_beside_the_root():
    shapes = on_meta(lambda: GPT(MODEL))
    total, block = (sum(p.numel() for p in m.parameters()) for m in (shapes, shapes.blocks[0]))
    root = total - MODEL.num_layers * block
    for peak, rest in ranks.run_ranks(2, _peak):
        assert rest < 1.01 * 4 * total / 2
        shards = 4 * (total - root) / 2
        assert peak < 1.01 * (shards + 4 * (root + block))
        assert peak < 0.75 * 4 * total


NUM_BLOCKS = 72  # 288 MiB of parameters


def _step_on_nvme(module):
    """Two steps with parameters, gradients and main parameters in files: engine and losses."""
    tier = {"nvme_path": "swap", "buffer_count": 3, "buffer_size": 2**18}
    config = ZeroConfig(
        stage=3,
        offload_param=OffloadConfig("nvme", **tier),
        offload_optimizer=OffloadConfig("nvme", max_in_cpu_bytes=0, **tier),
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-5)
    engine = Engine(module, [optimizer], config, device=CPU)
    losses = []
    for _ in range(2):
        engine.zero_grad()
        loss = module(torch.ones(1, SquareBlocks.WIDTH)).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return engine, losses


def _data_bytes():
    """Writable private memory of this process, which RLIMIT_DATA bounds."""
    (line,) = [t for t in Path("/proc/self/status").read_text().split("\n") if "VmData" in t]
    return int(line.split()[1]) * 1024


def _train_bounded(rank, world_size, bound):
    Path("swap").mkdir(exist_ok=True)
    return_freed_memory()
    small, _ = _step_on_nvme(SquareBlocks(2))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # The stacks of the engine's threads are not part of the bound.
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + bound, hard))
    small.close()
    with pytest.raises(RuntimeError, match="memory"):
        SquareBlocks(NUM_BLOCKS)
    engine, losses = _step_on_nvme(on_meta(lambda: SquareBlocks(NUM_BLOCKS)))
    engine.storage.close()  # `Engine.close` would bring all values into memory
    return losses


@pytest.mark.slow
def test_a_model_of_three_times_the_memory_of_a_rank_builds_from_meta_and_trains():
    bound = 4 * NUM_BLOCKS * SquareBlocks.WIDTH**2 // 3
    for first, second in ranks.run_ranks(2, _train_bounded, bound, timeout_s=120):
        assert second < first


# ---------------------------------------------------------------- checkpoints


class Stubborn(nn.Linear):
    """A layer that cannot initialize itself, with a buffer that it saves."""

    reset_parameters = None

    def __init__(self, *args):
        nn.Module.__init__(self)
        self.in_features, self.out_features = args
        self.weight = nn.Parameter(torch.linspace(-1, 1, args[0] * args[1]).view(args[::-1]))
        self.bias = nn.Parameter(torch.zeros(args[1]))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class StubbornMLP(MLPModule):
    """Has a `Stubborn` layer, optionally on the meta device; loads weights if `path` is given."""

    def __init__(self, is_meta=False, path=None, **kwargs):
        Recorder.__init__(self, **kwargs)
        with torch.device("meta" if is_meta else "cpu"):
            self.net = nn.Sequential(Stubborn(8, 13), nn.Tanh(), nn.Linear(13, 3))
        self.path = path

    def configure_model(self):
        if self.path is not None:
            load_weights(self, self.path)


def _load(rank, world_size, form):
    def make(is_meta=False, **kwargs):
        seed_everything(7, verbose=False)
        return StubbornMLP(is_meta, ranks=world_size, **kwargs)

    def fit(module, ckpt_path, **options):
        trainer = make_trainer(settings(3, checkpoint=form), max_epochs=2, **options)
        trainer.fit(module, ckpt_path=ckpt_path)
        return list(module.losses), arrays(module.state_dict())

    trainer = make_trainer(settings(2, checkpoint=form))
    module = make()
    trainer.fit(module)
    trainer.save_checkpoint("saved.ckpt")
    found = {"resumed": [fit(make(is_meta), "saved.ckpt") for is_meta in (False, True)]}
    found["weights"] = [fit(make(is_meta, path="saved.ckpt"), None) for is_meta in (False, True)]
    for is_meta in (False, True):
        trainer = make_trainer(settings(3), limit_val_batches=2)
        (metrics,) = trainer.validate(make(is_meta), ckpt_path="saved.ckpt", verbose=False)
        found.setdefault("validated", []).append(metrics["val_loss"])
    loaded = load_from_checkpoint(StubbornMLP, "saved.ckpt")
    found["loaded"] = [arrays(m.state_dict()) for m in (module, loaded)]
    with pytest.raises(ValueError, match=r"net\.0 \(Stubborn: weight, bias, calls\)\."):
        trainer.validate(make(True), verbose=False)
    return found


@pytest.mark.default_cases("1-sharded")
@pytest.mark.parametrize(("world_size", "form"), [(1, "sharded"), (2, "full")])
def test_values_of_a_checkpoint_need_no_initialization(world_size, form):
    for found in run_ranks(world_size, _load, form, has_group=False):
        assert found["validated"][0] == found["validated"][1]
        for key in ("resumed", "weights"):
            (losses, state), (meta_losses, meta_state) = found[key]
            assert losses == meta_losses
            for name, value in state.items():
                np.testing.assert_array_equal(meta_state[name], value, err_msg=name)
        for name, value in found["loaded"][0].items():
            np.testing.assert_array_equal(found["loaded"][1][name], value, err_msg=name)


@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_init_module_makes_empty_modules_on_meta_and_others_with_values(stage):
    trainer = make_trainer(settings(stage), devices=2, precision="bf16-true")
    with trainer.init_module(empty_init=True):
        empty = nn.Linear(2, 2)
    with trainer.init_module():
        full = nn.Linear(2, 2)
    assert empty.weight.is_meta
    assert full.weight.device == CPU
    assert {empty.weight.dtype, full.weight.dtype} == {torch.bfloat16}


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        for size in range(1, 9):
            self.register_buffer(f"table_{size}", torch.zeros(size))
        self.weight = nn.Parameter(torch.zeros(2))

    def reset_parameters(self):
        for tensor in (*self.parameters(), *self.buffers()):
            nn.init.ones_(tensor)


def test_buffers_are_sent_in_the_order_of_their_registration(monkeypatch):
    """Each process has its own order of sets of strings."""
    with torch.device("meta"):
        module = Tables()
    sent = []
    monkeypatch.setattr(
        Communicator, "broadcast_", lambda self, tensor: sent.append(tensor.numel())
    )
    Engine(module, [torch.optim.SGD(module.parameters())], ZeroConfig(stage=1), device=CPU).close()
    assert [numel for numel in sent if numel != 2][:7] == [1, 3, 4, 5, 6, 7, 8]
