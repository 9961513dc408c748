"""Loading into a module of an engine: like torch's `load_state_dict`, shard by shard."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero import Engine, OffloadConfig, ZeroConfig, gathered, load_weights
from lightning_zero.checkpoint import full_state_dict, load_module, load_optimizer
from lightning_zero.core.masters import Masters
from lightning_zero.tensors.lazy import LazyTensor
from lightning_zero.tensors.meta import set_pending_values
from tests.support.ranks import run_ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(9, 9), nn.BatchNorm1d(9)

    def forward(self, x):
        return self.norm(self.linear(x))


class Net(nn.Module):
    """Blocks, with a tied weight across them."""

    def __init__(self, block=Block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.last = nn.Linear(9, 9)
        self.last.weight = self.blocks[0].linear.weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def values_for(module, seed=5):
    """A state dict whose values differ from the module's."""
    generator = torch.Generator().manual_seed(seed)
    state = module.state_dict()
    for name, value in state.items():
        if value.is_floating_point():
            state[name] = torch.randn(value.shape, generator=generator)
    if "last.weight" in state:
        state["last.weight"] = state["blocks.0.linear.weight"]
    return state


def stored(state, reads=None):
    """The same state dict with lazy tensors, and the list of ranges that were read."""
    reads = [] if reads is None else reads

    def store(name, value):
        def read(start, stop):
            reads.append((name, start, stop))
            return value.reshape(-1)[start:stop].clone()

        return LazyTensor.of(value.shape, value.dtype, read)

    result = OrderedDict((name, store(name, value)) for name, value in state.items())
    result._metadata = getattr(state, "_metadata", {})
    return result


def start(stage, block=Block, **options):
    """An engine over a fresh module with a fresh AdamW of two groups."""
    torch.manual_seed(0)
    module = Net(block)
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return Engine(module, [optimizer], ZeroConfig(stage=stage, **options)), module, optimizer


def step(engine, module):
    engine.backward(module(torch.randn(4, 9, dtype=module.last.weight.dtype)).square().sum())
    engine.step()
    engine.zero_grad()


def assert_state(engine, expected):
    state = full_state_dict(engine)
    if engine.comm.rank == 0:
        for name, value in expected.items():
            assert torch.equal(state[name], value), name


def run(fn, *args, world_size=2):
    return run_ranks(world_size, fn, *args)


def _load_both(rank, world_size, stage):
    return [_load(stage, dtype) for dtype in (None, "bfloat16")]


def _load(stage, dtype):
    engine, module, _ = start(stage, param_dtype=dtype)
    expected = values_for(Net())
    reads = []
    load_module(module, stored(expected, reads))
    assert_state(engine, expected)  # to the last bit, from the masters
    sizes = {}
    for name, first, last in reads:
        sizes[name] = sizes.get(name, 0) + last - first
    with gathered(module):
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, expected[name].to(parameter.dtype)), name
    step(engine, module)
    return sizes


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", range(4))
def test_every_rank_reads_its_own_elements_and_masters_follow(stage):
    sizes = [by_name for both in run(_load_both, stage, world_size=3) for by_name in both]
    module = Net()
    names_of = {p: [] for p in module.parameters()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of[parameter].append(name)
    for parameter, names in names_of.items():
        expected = 2 * parameter.numel() * (3 if stage == 0 else 1)
        assert sum(by_name.get(n, 0) for by_name in sizes for n in names) == expected, names


def _errors(rank, world_size, stage):
    engine, module, _ = start(stage)
    before = {name: value.clone() for name, value in _full(engine).items()}
    state = values_for(Net())
    del state["blocks.1.linear.bias"], state["blocks.2.norm.running_var"]
    state["blocks.0.linear.bias"] = torch.zeros(4)
    state["blocks.1.norm.running_mean"] = torch.zeros(10)
    state["new.weight"] = torch.zeros(3)
    with pytest.raises(RuntimeError) as caught:
        load_module(module, state)
    text = str(caught.value)
    for name, value in _full(engine).items():
        assert torch.equal(value, before[name]), name
    step(engine, module)
    del state["blocks.0.linear.bias"], state["blocks.1.norm.running_mean"]
    missing, unexpected = load_module(module, state, strict=False)
    assert unexpected == ["new.weight"]
    assert "blocks.1.linear.bias" in missing
    return text


def _full(engine):
    with gathered(engine.module):
        return {name: value.clone() for name, value in engine.module.state_dict().items()}


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", range(4))
def test_all_mismatches_are_one_error_and_nothing_changes(stage):
    texts = run(_errors, stage)
    assert texts[0] == texts[1]
    lines = texts[0].split("\n\t")
    assert lines[1].startswith("Missing key(s)")
    assert "blocks.1.linear.bias" in lines[1]
    assert "blocks.2.norm.running_var" in lines[1]
    assert lines[2] == 'Unexpected key(s) in state_dict: "new.weight". '
    assert "size mismatch for blocks.0.linear.bias" in lines[3]
    assert "size mismatch for blocks.1.norm.running_mean" in lines[4]
    assert len(lines) == 5


class Layer(nn.Module):
    """A weight and a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 9))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        return x @ self.weight


class RenamingLayer(Layer):
    """Its weight had another name in older versions; a hook renames it."""

    def __init__(self):
        super().__init__()
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module, state_dict, prefix, *_):
        if f"{prefix}kernel" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel")


class TransposingLayer(Layer):
    """Its checkpoints have the transposed weight; its loading code writes the weight itself."""

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.weight.data.copy_(state_dict[f"{prefix}weight"].T)
        self.total.copy_(state_dict[f"{prefix}total"])


class LookingLayer(Layer):
    """Computes a buffer from its weight after loading."""

    def __init__(self):
        super().__init__()
        self.register_load_state_dict_post_hook(self.look)

    @staticmethod
    def look(module, incompatible):
        module.total.copy_(module.weight.sum())


class LoadingNet(nn.Module):
    """Has layers with and without custom loading code."""

    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(9, 9), kind(), nn.BatchNorm1d(9), nn.Linear(9, 9)])


class OverridingNet(LoadingNet):
    """Loads the state dict of another class, and reads its own weights."""

    def load_state_dict(self, state_dict, strict=True, assign=False):
        state_dict = {name.removeprefix("net."): value for name, value in state_dict.items()}
        result = super().load_state_dict(state_dict, strict, assign)
        self.norm_after = self.layers[0].weight.norm().item()
        return result


def _own_codes(rank, world_size, stage):
    return [_own_code(stage, *case) for case in OWN_CODE]


def _own_code(stage, net, kind):
    torch.manual_seed(0)
    module = net(kind)
    engine = Engine(module, config=ZeroConfig(stage=stage, reduce_bucket_size=96))
    assert len(engine.buckets) > 3
    expected = values_for(net(kind))
    state = OrderedDict(expected)
    state._metadata = expected._metadata
    if kind is RenamingLayer:
        state["layers.1.kernel"] = state.pop("layers.1.weight")
    if kind is TransposingLayer:
        state["layers.1.weight"] = state["layers.1.weight"].T.clone()
    if kind is LookingLayer:
        expected["layers.1.total"] = expected["layers.1.weight"].sum()
    if net is OverridingNet:
        state = OrderedDict((f"net.{name}", value) for name, value in state.items())
        state._metadata = expected._metadata
    gathered_names = []
    all_gather = Masters.all_gather

    def noted(masters):
        gathered_names.extend(slot.name for slot in masters._shards.plan.layout.slots)
        return all_gather(masters)

    Masters.all_gather = noted
    load_module(module, stored(state))
    Masters.all_gather = all_gather
    assert_state(engine, expected)
    assert torch.equal(module.layers[1].total, expected["layers.1.total"])
    if net is OverridingNet:
        assert module.norm_after == expected["layers.0.weight"].norm().item()
    return gathered_names


OWN_CODE = [
    (LoadingNet, RenamingLayer),
    (LoadingNet, TransposingLayer),
    (LoadingNet, LookingLayer),
    (OverridingNet, Layer),
]


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", range(4))
def test_only_modules_with_custom_loading_are_unsharded(stage):
    renaming, transposing, looking, overriding = run(_own_codes, stage)[0]
    assert not renaming
    for names in (transposing, looking):
        assert "layers.1.weight" in names
        assert not {"layers.0.weight", "layers.3.weight"} & set(names)
    assert len(overriding) == 7


def _ties(rank, world_size, stage):
    engine, module, _ = start(stage)
    expected = values_for(Net())
    state = OrderedDict(expected)
    del state["last.weight"]
    load_module(module, state)
    assert_state(engine, expected)


def test_one_name_of_a_tied_weight_is_enough():
    run(_ties, 3)


def _trained(stage):
    engine, module, optimizer = start(stage)
    for _ in range(2):
        step(engine, module)
    return engine, module, optimizer


def _by_name(engine, optimizer, state):
    """Converts a state by number to FSDP2's layout, by name."""
    name_of = {p: name for name, p in engine.module.named_parameters()}
    names = [name_of[p] for group in optimizer.param_groups for p in group["params"]]
    return {
        "state": {names[number]: entry for number, entry in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def _optimizer_by_name(rank, world_size, stage):
    from lightning_zero.optim.state import optimizer_state_dict

    engine, _, optimizer = _trained(stage)
    state = optimizer_state_dict(optimizer, engine.buckets, is_recipient=True)
    named = _by_name(engine, optimizer, state)
    named["param_groups"].reverse()  # parameter groups in another order
    named["param_groups"][0]["lr"] = 0.5
    reads = []
    for name, entry in named["state"].items():
        metadata = OrderedDict(entry)
        metadata._metadata = {}
        named["state"][name] = dict(stored(metadata, reads))
    engine.close()
    engine, _, optimizer = start(stage)
    load_optimizer(engine, optimizer, named)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 0.5]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    again = optimizer_state_dict(optimizer, engine.buckets, is_recipient=True)
    for number, entry in state["state"].items():
        for key, value in entry.items():
            assert torch.equal(again["state"][number][key], value)
    numel = sum(p.numel() for p in Net().parameters())
    return sum(last - first for key, first, last in reads if key != "step") / (2 * numel)


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", range(4))
def test_states_by_name_are_read_by_shards(stage):
    parts = run(_optimizer_by_name, stage)
    assert sum(parts) == pytest.approx(2 if stage == 0 else 1)


def _optimizers_in_files(rank, world_size):
    for dtype in (None, "bfloat16"):
        _optimizer_in_files(rank, dtype)


def _optimizer_in_files(rank, dtype):
    from lightning_zero.optim.state import optimizer_state_dict

    engine, module, optimizer = start(3, param_dtype=dtype)
    step(engine, module)
    state = optimizer_state_dict(optimizer, engine.buckets, is_recipient=True)
    weights = engine.comm.control.broadcast_object(full_state_dict(engine))
    Path("swap").mkdir(exist_ok=True)
    offload = OffloadConfig("nvme", nvme_path="swap", buffer_count=3, buffer_size=2**16)
    other, same, loaded = start(3, param_dtype=dtype, offload_optimizer=offload)
    load_module(same, stored(weights))
    load_optimizer(other, loaded, _by_name(other, loaded, state))
    for bucket in other.buckets:
        assert "exp_avg" in bucket.shards.states.stores
    again = optimizer_state_dict(loaded, other.buckets, is_recipient=True)
    for number, entry in state["state"].items():
        for key, value in entry.items():
            assert torch.equal(again["state"][number][key], value)
    for trained, net in ((engine, module), (other, same)):
        torch.manual_seed(9 + rank)
        step(trained, net)
    expected, state = full_state_dict(engine), full_state_dict(other)
    if rank == 0:
        for name, value in expected.items():
            assert torch.equal(state[name], value), name
    engine.close()
    other.close()


def test_states_and_masters_on_nvme_are_loaded_there():
    run(_optimizers_in_files)


def _optimizer_errors(rank, world_size):
    from lightning_zero.optim.state import optimizer_state_dict

    engine, module, optimizer = _trained(2)
    state = optimizer_state_dict(optimizer, engine.buckets, is_recipient=True)
    named = _by_name(engine, optimizer, state)
    del named["param_groups"][1]["params"][0]
    named["state"]["other.weight"] = {}
    with pytest.raises(ValueError, match=r"no state for blocks.0.linear.bias and states for other"):
        load_optimizer(engine, optimizer, named)
    state["state"][0]["exp_avg"] = torch.zeros(9, 8)
    with pytest.raises(
        ValueError, match=r"exp_avg of blocks.0.linear.weight .* \(9, 8\).* \(9, 9\)"
    ):
        load_optimizer(engine, optimizer, state)
    named = _by_name(engine, optimizer, state)
    names = [name for group in named["param_groups"] for name in group["params"]]
    named["param_groups"] = [named["param_groups"][0] | {"params": names}]
    with pytest.raises(ValueError, match="groups 0 and 1, whose options differ, were saved in one"):
        load_optimizer(engine, optimizer, named)
    state["param_groups"].pop()
    with pytest.raises(ValueError, match=r"groups of \[3\] parameters, .* groups of \[3, 10\]"):
        load_optimizer(engine, optimizer, state)
    step(engine, module)
    assert all(float(s["step"]) == 3 for s in optimizer.state.values())
    for number, group in enumerate(optimizer.param_groups):  # equal options, but for the names
        group |= {"lr": 0.5, "weight_decay": 0.0, "param_names": [str(number)]}
    load_optimizer(engine, optimizer, named | {"state": {}})
    assert [group["param_names"] for group in optimizer.param_groups] == [["0"], ["1"]]


def test_a_state_that_does_not_fit_the_optimizer_is_an_error_and_changes_nothing():
    run(_optimizer_errors)


def test_meta_parameters_are_loaded_when_materialized():
    with torch.device("meta"):
        module = Net()
    expected = values_for(Net())
    with pytest.raises(ValueError, match=r"blocks.0.linear.weight is on the meta device"):
        load_module(module, expected)
    awaited = {}
    load_module(module, expected, awaited=awaited)
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert awaited.keys() == named.keys()
    set_pending_values(module, awaited)
    engine = Engine(module, device=torch.device("cpu"))
    engine.close()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, expected[name])
    with torch.device("meta"):
        module = LoadingNet(TransposingLayer)
    with pytest.raises(ValueError, match=r"layers.1.weight is on the meta device"):
        load_module(module, values_for(LoadingNet(TransposingLayer)), awaited={})


def anonymous_bytes():
    """Anonymous memory of this process, in bytes."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"Anonymous:\s+(\d+)", text).group(1)) * 1024


def _peak(rank, world_size, path, num_layers, width):
    """Bytes that loading adds to the memory: peak, and afterwards."""
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))
    engine = Engine(module, config=ZeroConfig(stage=3))
    load_weights(module, path)  # imports modules, and makes caches of Python's
    before = anonymous_bytes()
    seen = [before]
    load = Masters.load

    def watched(masters, read):
        def watch(index, owned):
            values = read(index, owned)
            seen.append(anonymous_bytes())
            return values

        load(masters, watch)
        seen.append(anonymous_bytes())

    Masters.load = watched
    load_weights(module, path)
    Masters.load = load
    after = anonymous_bytes()
    expected = torch.load(path, mmap=True, weights_only=True) if path.endswith("pt") else None
    if expected is not None:
        assert_state(engine, expected)
    return max(seen) - before, after - before


@pytest.mark.default_cases("pt")
@pytest.mark.parametrize("suffix", ["pt", "safetensors", "deepspeed"])
def test_loading_takes_the_memory_of_one_bucket_beside_the_shard(tmp_path, suffix):
    num_layers, width = 12, 1024  # 4 MiB a layer
    state = {f"{i}.weight": torch.randn(width, width) for i in range(num_layers)}
    path = tmp_path / f"weights.{suffix}"
    if suffix == "pt":
        torch.save(state, path)
    elif suffix == "safetensors":
        from safetensors.torch import save_file

        save_file(state, path)
    else:
        from tests.support.deepspeed_format import write_deepspeed

        module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))
        module.load_state_dict(state)
        optimizer = torch.optim.AdamW(module.parameters())
        optimizer.param_groups[0]["params"][0].grad = None
        for parameter in module.parameters():
            zeros = torch.zeros_like(parameter)
            optimizer.state[parameter] = {"step": 1, "exp_avg": zeros, "exp_avg_sq": zeros}
        write_deepspeed(path, module, optimizer, stage=3, world_size=3)
    for peak, kept in run(_peak, str(path), num_layers, width):
        assert peak < 6 * 2**20  # a bucket is 4 MiB, the shard 24 MiB, the file 48 MiB
        assert kept < 3 * 2**20


def _load_damaged(rank, world_size, path):
    state = {f"{i}.weight": torch.full((64, 64), float(i)) for i in range(3)}
    if rank == 0:
        torch.save(state, path)
        data = bytearray(Path(path).read_bytes())
        data[data.index(state["1.weight"].numpy().tobytes()) + 5] ^= 1
        Path(path).write_bytes(data)
    dist.barrier()
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    own = module[0].weight.detach().clone()
    texts = []
    with pytest.raises(ValueError, match="is damaged: record") as caught:
        load_weights(module, path)
    texts.append(str(caught.value))
    engine = Engine(module, config=ZeroConfig(stage=3))
    with pytest.raises(ValueError, match="is damaged: record") as caught:
        load_weights(module, path)
    texts.append(str(caught.value))
    with gathered(module):
        assert rank > 0 or torch.equal(module[0].weight, own)
    load_weights(module, path, verify=False)
    with gathered(module):
        assert torch.equal(module[2].weight, state["2.weight"])
    engine.close()
    return texts


def test_damaged_weights_are_refused_on_every_rank_unless_verify_is_off(tmp_path):
    first, second = run(_load_damaged, str(tmp_path / "weights.pt"))
    assert first == second
    assert all("weights/data/1" in text for text in first)
