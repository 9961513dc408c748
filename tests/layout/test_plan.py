"""The plan of units and buckets of a module, on the meta device."""

import pytest
import torch
from torch import nn

from examples.gpt import GPT, GPTConfig
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.flat import StateBlocks
from lightning_zero.layout.offload import BucketTiers, OffloadConfig, Tier
from lightning_zero.layout.plan import make_plan, nvme_bytes


@pytest.fixture(autouse=True)
def _on_meta():
    with torch.device("meta"):
        yield


def plan(module, world_size=4, **settings):
    return make_plan(module, ZeroConfig(**settings), world_size=world_size)


def names(module, **settings):
    return {
        unit.name: [slot.name for bucket in unit.buckets for slot in bucket.layout.slots]
        for unit in plan(module, **settings).units
    }


def gpt(**kwargs):
    return GPT(GPTConfig(vocab_size=512, context=16, width=64, num_layers=3, num_heads=2, **kwargs))


def test_repeated_blocks_are_units_and_small_leftovers_belong_to_the_root():
    units = names(gpt())
    assert list(units) == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert "tokens.weight" in units[""]
    assert all(name.startswith("blocks.1.") for name in units["blocks.1"])


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)


class Holding(nn.Module):
    """Blocks of one size, and another layer."""

    def __init__(self, size, num_blocks):
        super().__init__()
        self.beside = nn.Linear(size, 1)
        self.blocks = nn.ModuleList([Block(size) for _ in range(num_blocks)])


def units_of(make, **settings):
    with torch.device("meta"):
        return [unit for unit in names(make(), **settings) if unit]


@pytest.mark.parametrize(
    "make_block", [lambda: Block(8), lambda: nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 8))]
)
def test_a_stack_between_two_layers_is_unsharded_block_by_block(make_block):
    def make():
        stack = nn.Sequential(*[make_block() for _ in range(3)])
        return nn.Sequential(nn.Linear(8, 8), stack, nn.Linear(8, 8))

    assert units_of(make) == ["0", "1.0", "1.1", "1.2", "2"]


def test_stages_of_a_vision_model_are_unsharded_block_by_block():
    def make():
        return nn.ModuleList([Holding(4, 1), Holding(8, 2), Holding(16, 2)])

    assert units_of(make) == ["0", "1.blocks.0", "1.blocks.1", "2.blocks.0", "2.blocks.1"]


def test_a_layer_among_equal_layers_is_one_unit_whatever_experts_it_holds():
    assert units_of(lambda: nn.ModuleList([Holding(8, 4) for _ in range(3)])) == ["0", "1", "2"]


def test_a_block_in_two_lists_is_no_unit_twice():
    block = Block(4)
    lists = nn.ModuleList([nn.ModuleList([block, Block(4)]), nn.ModuleList([block, Block(4)])])
    assert units_of(lambda: lists) == ["0.1", "1.1"]  # shared parameters belong to the root


def test_units_are_selected_by_class_by_class_name_or_by_pattern():
    def make():
        return nn.ModuleList([Holding(4, 2) for _ in range(2)])

    assert units_of(make, unit_classes=Holding) == ["0", "1"]
    blocks = ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1"]
    assert units_of(make, unit_classes="Block") == blocks
    assert units_of(make, unit_classes=["0", "*.blocks.1"]) == ["0", "0.blocks.1", "1.blocks.1"]
    with pytest.raises(ValueError, match=r"unit_classes has 'Blok', which matches no.*Block"):
        units_of(make, unit_classes="Blok")


def test_large_modules_of_their_own_are_units():
    module = nn.ModuleDict({"embedding": nn.Embedding(8192, 64), "head": nn.Linear(64, 10)})
    assert set(names(module)) == {"", "embedding"}


def test_parameters_shared_by_two_units_belong_to_the_root():
    module = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    module[1].weight = module[0].weight
    units = names(module)
    assert units[""] == ["0.weight"]
    assert units["0"] == ["0.bias"]
    assert units["1"] == ["1.bias"]


def test_only_the_outermost_container_is_split_into_units():
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    assert list(names(nn.Sequential(*blocks))) == ["", "0", "1"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_parameter_is_in_exactly_one_bucket(stage):
    module = gpt(is_tied=True)
    held = [slot for bucket in plan(module, stage=stage).buckets for slot in bucket.layout.slots]
    assert sorted(slot.name for slot in held) == sorted(n for n, _ in module.named_parameters())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_with_unsharded_parameters_bucketize_by_size(stage):
    buckets = plan(gpt(), stage=stage, reduce_bucket_size=40_000).buckets
    assert len(buckets) > 2
    slots = [bucket.layout.slots for bucket in buckets]
    assert all(len(one) == 1 or sum(slot.numel for slot in one) <= 40_000 for one in slots)


def test_the_smaller_of_the_two_bucket_sizes_applies():
    small = plan(gpt(), stage=1, reduce_bucket_size=10**9, allgather_bucket_size=40_000)
    assert len(small.buckets) == len(plan(gpt(), stage=1, reduce_bucket_size=40_000).buckets)


def test_a_repeated_block_is_one_bucket_of_any_size():
    (bucket,) = plan(gpt(), stage=3, reduce_bucket_size=1).units[1].buckets
    assert len(bucket.layout.slots) == 12


def test_small_parameters_below_the_threshold_stay_unsharded():
    module = gpt()
    buckets = plan(module, stage=3, param_persistence_threshold=1000).buckets
    (replicated,) = [bucket for bucket in buckets if not bucket.stage.shards_params]
    small = {name for name, p in module.named_parameters() if p.numel() < 1000}
    assert {slot.name for slot in replicated.layout.slots} == small


def test_frozen_parameters_and_other_dtypes_have_buckets_of_their_own():
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16))
    module[0].bias.requires_grad_(False)
    kinds = [(b.name, b.dtype, b.master_dtype) for b in plan(module, stage=1).buckets]
    assert kinds == [
        ("root", torch.float32, torch.float32),
        ("root/frozen", torch.float32, torch.float32),
        ("root", torch.bfloat16, torch.float32),
    ]


def test_batch_norm_keeps_the_dtype_of_its_statistics():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    dtypes = {b.layout.slots[0].name: b.dtype for b in plan(module, param_dtype="bf16").buckets}
    assert dtypes == {"0.weight": torch.bfloat16, "1.weight": torch.float32}


class Mixed(nn.Module):
    """Vectors, matrices, a shared parameter, and all layers that the rule distinguishes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(8))
        self.token = nn.Parameter(torch.empty(1, 1, 8))
        self.table = nn.Parameter(torch.empty(1, 4, 8))
        self.linear = nn.Linear(8, 1)
        self.attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)
        self.cell = nn.LSTM(8, 8)
        self.norm = nn.LayerNorm((4, 8))
        self.pair = nn.Bilinear(8, 8, 3)
        self.linear.of_pair = self.pair.weight


def dtypes(module, **settings):
    buckets = plan(module, param_dtype="bf16", **settings).buckets
    return {slot.name: b.dtype for b in buckets for slot in b.layout.slots}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_vectors_and_modules_that_autocast_does_not_cast_stay_in_float32(stage):
    found = dtypes(Mixed(), stage=stage, keep_float32="autocast")
    kept = {name for name, dtype in found.items() if dtype is torch.float32}
    assert kept == {
        "scale",
        "token",
        "linear.of_pair",
        "norm.weight",
        "norm.bias",
        "pair.bias",
    }


def test_without_autocast_only_modules_with_statistics_stay_in_float32():
    assert set(dtypes(Mixed()).values()) == {torch.bfloat16}


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        ("blocks.0.norm_1.weight", ["blocks.0.norm_1.weight"]),
        ("blocks.1.q*", ["blocks.1.qkv.weight", "blocks.1.qkv.bias"]),
        ("*.up.weight", [f"blocks.{i}.up.weight" for i in range(3)]),
        ("tokens", ["tokens.weight"]),
        (nn.Embedding, ["tokens.weight", "positions.weight"]),
        (["Embed*", "head"], ["tokens.weight", "positions.weight", "head.weight"]),
    ],
)
def test_names_patterns_and_classes_select_what_stays_in_float32(wanted, kept):
    found = dtypes(gpt(), keep_float32=wanted)
    assert [name for name, dtype in found.items() if dtype is torch.float32] == kept


def test_an_unknown_name_is_an_error_that_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"keep_float32 has 'token'.*The nearest: .*tokens"):
        dtypes(gpt(), keep_float32="token")
    with pytest.raises(ValueError, match="keep_float32 has Conv2d"):
        dtypes(gpt(), keep_float32=nn.Conv2d)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_float32_parameters_add_at_most_one_bucket_to_a_plan(stage):
    settings = {"stage": stage, "param_dtype": "bf16"}
    before = plan(gpt(), **settings).buckets
    after = plan(gpt(), **settings, keep_float32="autocast").buckets
    assert len(before) <= len(after) <= len(before) + 1


def test_a_threshold_of_zero_replicates_nothing():
    settings = {"stage": 3, "param_dtype": "bf16", "keep_float32": "autocast"}
    replicated = [
        any(not bucket.stage.shards_params for bucket in plan(gpt(), **settings, **more).buckets)
        for more in ({}, {"param_persistence_threshold": 0})
    ]
    assert replicated == [True, False]


def test_a_vector_between_matrices_is_no_bucket_of_its_own():
    sizes = [1000, 10, 1000, 10, 10, 1000, 100, 1000]
    module = nn.ParameterList(nn.Parameter(torch.empty(size)) for size in sizes)
    buckets = plan(module, world_size=1, stage=2, reduce_bucket_size=500).buckets
    found = [[slot.numel for slot in bucket.layout.slots] for bucket in buckets]
    assert found == [[1000, 10], [1000, 10, 10], [1000], [100], [1000]]


def test_a_bucket_grows_with_the_number_of_ranks():
    module = nn.ParameterList(nn.Parameter(torch.empty(2**20)) for _ in range(64))
    assert len(plan(module, world_size=8, stage=1).buckets) == 16
    assert len(plan(module, world_size=64, stage=1).buckets) == 4


def tiers_of(**settings):
    return [bucket.tiers for bucket in plan(gpt(), **settings).buckets]


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_offloaded_buckets_are_on_the_tier_of_the_settings(device):
    tier = Tier(device)
    for tiers in tiers_of(stage=3, offload_optimizer=device, offload_param=device):
        assert tiers == BucketTiers(param=tier, optim=tier, grad=Tier.CPU)
    for tiers in tiers_of(stage=2, offload_optimizer=device):
        assert tiers == BucketTiers(param=Tier.DEVICE, optim=tier, grad=Tier.CPU)
    for tiers in tiers_of(stage=3, offload_param=device):
        assert tiers == BucketTiers(param=tier)


def test_frozen_parameters_are_on_the_tier_of_trained_ones():
    module = gpt()
    module.blocks.requires_grad_(False)
    optimizer = {p: 0 for p in module.parameters() if p.requires_grad}
    config = ZeroConfig(stage=3, offload_optimizer="cpu", offload_param="cpu")
    for bucket in make_plan(module, config, world_size=4, optimizer_of=optimizer).buckets:
        assert bucket.tiers.param is Tier.CPU
        assert bucket.tiers.optim is Tier.CPU


def test_half_of_the_bytes_are_offloaded_with_a_ratio_of_one_half():
    config = OffloadConfig("cpu", ratio=0.5)
    buckets = plan(gpt(), stage=2, reduce_bucket_size=40_000, offload_optimizer=config).buckets
    offloaded = sum(b.layout.shard_numel for b in buckets if b.tiers.optim is Tier.CPU)
    total = sum(b.layout.shard_numel for b in buckets)
    assert abs(offloaded / total - 0.5) <= max(b.layout.shard_numel for b in buckets) / 2 / total


def test_auto_counts_the_bytes_of_masters_and_moments_of_a_shard():
    # Stage 3, bf16 parameters on 4 ranks. Bytes per element: 2 of parameters, 12 of optimizer
    # state, 4 of gradients.
    (_, block, *_) = plan(gpt(), stage=3, param_dtype="bf16").buckets
    numel = block.layout.shard_numel
    settings = {"stage": 3, "param_dtype": "bf16"}

    def optim_tiers(device_bytes, cpu_bytes):
        config = OffloadConfig("auto", max_in_device_bytes=device_bytes, max_in_cpu_bytes=cpu_bytes)
        buckets = plan(gpt(), **settings, offload_optimizer=config).buckets
        return [b.tiers.optim for b in buckets if b.name.startswith("blocks")]

    root = plan(gpt(), **settings).buckets[0].layout.shard_numel * 16
    three = optim_tiers(root + 16 * numel, 16 * numel)
    assert three == [Tier.DEVICE, Tier.CPU, Tier.NVME]
    assert optim_tiers(root + 16 * numel - 1, 16 * numel) == [Tier.CPU, Tier.NVME, Tier.NVME]


def test_auto_counts_the_bytes_of_states_with_numbers_of_blocks():
    # Stage 3, float32 parameters: 520 bytes of states per 256 elements, and 4 of each gradient.
    module, blocks = nn.Linear(512, 512, bias=False), {0: StateBlocks(256, nbytes=520)}

    def optim_tiers(cpu_bytes):
        auto = OffloadConfig("auto", max_in_device_bytes=0, max_in_cpu_bytes=cpu_bytes)
        config, of = ZeroConfig(stage=3, offload_optimizer=auto), {module.weight: 0}
        made = make_plan(module, config, world_size=4, optimizer_of=of, state_blocks=blocks)
        return [bucket.tiers.optim for bucket in made.buckets]

    needed = 256 * 520 + 65536 * 4
    assert optim_tiers(needed) == [Tier.CPU]
    assert optim_tiers(needed - 1) == [Tier.NVME]


def full_tensor_plan(module, owned, *, stage, world_size=8, **settings):
    """Plan with optimizer 0 stepping `owned` as full tensors, and optimizer 1 the others."""
    of = dict.fromkeys(module.parameters(), 1) | dict.fromkeys(owned, 0)
    config = ZeroConfig(stage=stage, **settings)
    return make_plan(module, config, world_size=world_size, optimizer_of=of, full_optimizers=[0])


def matrices(module):
    return [p for name, p in module.named_parameters() if "blocks" in name and p.dim() == 2]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_buckets_of_full_tensors_are_separate_and_balanced_over_ranks(stage):
    module = GPT(GPTConfig(vocab_size=512, context=16, width=64, num_layers=8, num_heads=2))
    owned = matrices(module)
    buckets = full_tensor_plan(module, owned, stage=stage, reduce_bucket_size=10**5).buckets
    slots = [slot for bucket in buckets for slot in bucket.layout.slots]
    names = {name for name, p in module.named_parameters() if any(p is o for o in owned)}
    assert {slot.name for slot in slots if slot.owner is not None} == names
    for bucket in buckets:
        assert len({slot.owner is None for slot in bucket.layout.slots}) == 1
    loads = [sum(slot.numel for slot in slots if slot.owner == rank) for rank in range(8)]
    assert max(loads) == min(loads) == sum(p.numel() for p in owned) // 8
    stored = [sum(len(b.layout.shard(rank)) for b in buckets) for rank in range(8)]
    assert max(stored) < 1.02 * sum(p.numel() for p in module.parameters()) / 8


def test_parameters_without_an_optimizer_have_owners_if_another_optimizer_steps_full_tensors():
    module = gpt()
    of = dict.fromkeys(matrices(module), 0)
    config = ZeroConfig(stage=3)
    plans = [
        make_plan(module, config, world_size=4, optimizer_of=of, full_optimizers=full)
        for full in ([0], [])
    ]
    assert all(bucket.layout.has_tensor_owners for bucket in plans[0].buckets)
    assert not any(bucket.layout.has_tensor_owners for bucket in plans[1].buckets)


def test_stage_0_has_no_tensor_owners_because_every_rank_steps_everything():
    module = gpt()
    buckets = full_tensor_plan(module, list(module.parameters()), stage=0).buckets
    assert not any(bucket.layout.has_tensor_owners for bucket in buckets)


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_a_disk_needs_space_for_masters_of_frozen_parameters_that_were_rounded(own):
    module = nn.Linear(64, 64, bias=False, dtype=own).requires_grad_(False)
    offload = OffloadConfig(device="nvme", nvme_path=".")
    config = ZeroConfig(stage=3, param_dtype=torch.bfloat16, offload_optimizer=offload)
    plan = make_plan(module, config, world_size=2)
    masters = 64 * 64 * 4 // 2 if own is torch.float32 else 0
    assert nvme_bytes(plan) == (0, masters)
