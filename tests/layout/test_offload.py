"""Options of offload, and the tier of each shard; no tensor is allocated."""

from __future__ import annotations

import re
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_zero import OffloadConfig
from lightning_zero.layout.offload import BucketTiers, Budgets, ShardBytes, Tier, assign_tiers

ON_DEVICE = BucketTiers()
SIZES = st.integers(0, 1000)
SHARDS = st.lists(st.builds(ShardBytes, param=SIZES, optim=SIZES, grad=SIZES), max_size=12)
BUDGETS = st.builds(Budgets, device_bytes=st.integers(0, 6000), cpu_bytes=st.integers(0, 6000))
BOUND = st.none() | st.integers(0, 6000)
FIXED = st.builds(OffloadConfig, st.sampled_from(["cpu", "nvme"]), ratio=st.floats(0, 1))
AUTO = st.builds(OffloadConfig, st.just("auto"), max_in_cpu_bytes=BOUND, max_in_device_bytes=BOUND)


# Options.


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"device": "disk"}, ValueError, r"one of \('cpu', 'nvme', 'auto'\), got 'disk'"),
        ({"device": None}, ValueError, "device of an offload"),
        ({"pin_memory": 1}, TypeError, "pin_memory must be True or False, got 1"),
        ({"buffer_count": 1}, ValueError, "buffer_count must be at least 2, got 1"),
        ({"buffer_count": 2.5}, TypeError, "buffer_count must be an integer, got 2.5"),
        ({"buffer_count": True}, TypeError, "buffer_count must be an integer"),
        ({"buffer_size": 1000}, ValueError, "buffer_size must be at least 65536, got 1000"),
        ({"buffer_size": "1e8"}, TypeError, "buffer_size must be an integer, got '1e8'"),
        ({"ratio": -0.1}, ValueError, r"ratio must be from 0 \(nothing\) to 1 \(all\), got -0.1"),
        ({"ratio": 1.5}, ValueError, "ratio must be from 0"),
        ({"ratio": float("nan")}, ValueError, "ratio must be from 0"),
        ({"ratio": True}, TypeError, "ratio must be a number from 0 to 1, got True"),
        ({"ratio": "half"}, TypeError, "ratio must be a number"),
        ({"device": "nvme", "nvme_path": 3}, TypeError, "str, bytes or os.PathLike"),
        ({"device": "nvme", "max_in_cpu_bytes": -1}, ValueError, "max_in_cpu_bytes must be at"),
        ({"device": "auto", "max_in_device_bytes": 0.5}, TypeError, "max_in_device_bytes must be"),
        ({"nvme_path": "/swap"}, ValueError, "nvme_path needs device 'nvme' or 'auto', got 'cpu'"),
        ({"max_in_cpu_bytes": 1}, ValueError, "max_in_cpu_bytes needs device 'nvme' or 'auto'"),
        ({"max_in_device_bytes": 1}, ValueError, "max_in_device_bytes needs device 'auto'"),
        (
            {"device": "nvme", "max_in_device_bytes": 1},
            ValueError,
            "max_in_device_bytes needs device 'auto', got 'nvme'; use ratio",
        ),
        ({"device": "auto", "ratio": 0.5}, ValueError, "ratio needs device 'cpu' or 'nvme'"),
    ],
)
def test_a_value_without_meaning_is_refused_with_what_to_do(settings, error, message):
    with pytest.raises(error, match=message):
        OffloadConfig(**settings)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("disk", ValueError, r"offload_param must be None or one of .*got 'disk'"),
        ("CPU", ValueError, "got 'CPU'"),
        (True, TypeError, "a mapping or an OffloadConfig, got True"),
        (1, TypeError, "got 1"),
        (["cpu"], TypeError, "offload_param must be None"),
        ({"device": "cpu", "rate": 1}, ValueError, "offload_param has no rate; it has device,"),
        ({"device": "cpu", 3: 1}, ValueError, "offload_param has no 3"),
        ({"device": "cpu", "ratio": 2}, ValueError, "ratio must be from 0"),
    ],
)
def test_an_invalid_offload_is_refused_by_the_name_of_its_setting(value, error, message):
    with pytest.raises(error, match=message):
        OffloadConfig.of("offload_param", value)


@pytest.mark.parametrize("value", [None, "none", {}, {"device": None}, {"device": "none"}])
def test_no_offload_can_be_written_in_several_ways(value):
    assert OffloadConfig.of("offload_param", value) is None


def test_a_mapping_or_a_name_makes_the_same_config():
    assert OffloadConfig.of("x", "nvme") == OffloadConfig("nvme")
    asked = OffloadConfig("nvme", nvme_path="/swap", ratio=0.5, buffer_size=2**20)
    mapping = {"device": "nvme", "nvme_path": "/swap", "ratio": 0.5, "buffer_size": 2.0**20}
    assert OffloadConfig.of("x", mapping) == asked
    assert OffloadConfig.of("x", asked) is asked


def test_the_nvme_folder_is_the_configured_one_or_that_of_the_environment(monkeypatch, tmp_path):
    for name in ("LIGHTNING_ZERO_NVME_PATH", "SLURM_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    assert OffloadConfig("nvme").folder == tempfile.gettempdir()
    monkeypatch.setenv("SLURM_TMPDIR", "/of-the-job")
    assert OffloadConfig("nvme").folder == "/of-the-job"
    monkeypatch.setenv("LIGHTNING_ZERO_NVME_PATH", "/of-the-user")
    assert OffloadConfig("nvme").folder == "/of-the-user"
    assert OffloadConfig("nvme", nvme_path=tmp_path).folder == str(tmp_path)
    monkeypatch.setenv("LIGHTNING_ZERO_NVME_PATH", "")  # as if it were not set
    assert OffloadConfig("nvme").folder == "/of-the-job"


def test_every_field_is_documented():
    for name in OffloadConfig.__dataclass_fields__:
        assert re.search(rf"^ +{name}: ", OffloadConfig.__doc__, flags=re.MULTILINE), name


# Tiers of shards.


def in_tier(tiers, shards, state, tier):
    return sum(
        getattr(shard, state)
        for assigned, shard in zip(tiers, shards, strict=True)
        if getattr(assigned, state) is tier
    )


@given(SHARDS, st.none() | FIXED | AUTO, st.none() | FIXED | AUTO, BUDGETS)
def test_every_shard_has_a_tier_and_a_gradient_is_where_its_optimizer_steps(
    shards, param, optim, budgets
):
    tiers = assign_tiers(shards, param, optim, budgets)
    assert len(tiers) == len(shards)
    for assigned in tiers:
        assert all(isinstance(t, Tier) for t in (assigned.param, assigned.optim, assigned.grad))
        if assigned.optim is Tier.NVME:
            assert assigned.grad in (Tier.CPU, Tier.NVME)
        else:
            assert assigned.grad is assigned.optim
    assert tiers == assign_tiers(shards, param, optim, budgets)


@given(SHARDS, BUDGETS)
def test_without_offload_everything_stays_on_the_device(shards, budgets):
    assert assign_tiers(shards, None, None, budgets) == [ON_DEVICE] * len(shards)


@given(SHARDS, FIXED, BUDGETS)
def test_the_ratio_is_met_within_half_a_bucket_at_every_bucket(shards, config, budgets):
    tier = Tier(config.device)
    for number in range(len(shards) + 1):
        part = shards[:number]
        total = sum(shard.optim for shard in part)
        away = in_tier(assign_tiers(part, None, config, budgets), part, "optim", tier)
        largest = max((shard.optim for shard in part), default=0)
        assert abs(away - config.ratio * total) <= largest / 2 + 1e-6


@given(SHARDS, st.sampled_from(["cpu", "nvme"]), st.sampled_from([0.0, 1.0]))
def test_a_ratio_of_one_is_all_and_of_zero_nothing(shards, device, ratio):
    config = OffloadConfig(device, ratio=ratio)
    expected = Tier(device) if ratio else Tier.DEVICE
    for assigned, shard in zip(
        assign_tiers(shards, config, config, Budgets()), shards, strict=True
    ):
        assert assigned.param is (expected if shard.param else Tier.DEVICE)
        assert assigned.optim is (expected if shard.optim else Tier.DEVICE)


@given(SHARDS, BOUND, st.floats(0, 1))
def test_gradients_of_nvme_take_no_more_cpu_memory_than_allowed(shards, bound, ratio):
    config = OffloadConfig("nvme", max_in_cpu_bytes=bound, ratio=ratio)
    tiers = assign_tiers(shards, None, config, Budgets())
    held = in_tier(tiers, shards, "grad", Tier.CPU)
    if bound is None:
        assert all(assigned.grad is not Tier.NVME for assigned in tiers)
    else:
        assert held <= bound


def budgets_of(configs, budgets):
    """Bytes of device and CPU that "auto" may fill: the configured ones, else `budgets`."""
    asked = [config for config in configs if config is not None]
    devices = [c.max_in_device_bytes for c in asked if c.max_in_device_bytes is not None]
    cpus = [c.max_in_cpu_bytes for c in asked if c.max_in_cpu_bytes is not None]
    return (
        max(devices, default=budgets.device_bytes),
        max(cpus, default=budgets.cpu_bytes),
    )


@given(SHARDS, st.none() | AUTO, AUTO, BUDGETS)
def test_auto_never_exceeds_its_budgets(shards, param, optim, budgets):
    tiers = assign_tiers(shards, param, optim, budgets)
    limits = budgets_of((param, optim), budgets)
    states = ("param", "optim", "grad") if param is not None else ("optim", "grad")
    for tier, limit in zip((Tier.DEVICE, Tier.CPU), limits, strict=True):
        # A gradient is on the tier of its optimizer shard; an empty shard needs no memory.
        paid = sum(in_tier(tiers, shards, state, tier) for state in states)
        unpaid = sum(
            shard.grad
            for shard, assigned in zip(shards, tiers, strict=True)
            if shard.optim == 0 and assigned.grad is tier
        )
        assert paid - unpaid <= limit


@given(SHARDS, AUTO, BUDGETS)
def test_auto_chooses_for_parameters_before_optimizer_states(shards, config, budgets):
    with_optim = assign_tiers(shards, config, config, budgets)
    alone = assign_tiers(shards, config, None, budgets)
    assert [assigned.param for assigned in with_optim] == [assigned.param for assigned in alone]


@given(SHARDS, AUTO, BUDGETS)
def test_auto_uses_a_slower_tier_only_where_the_faster_is_full(shards, config, budgets):
    device, cpu = budgets_of((config,), budgets)
    for assigned, shard in zip(assign_tiers(shards, None, config, budgets), shards, strict=True):
        nbytes = shard.optim + shard.grad
        if shard.optim == 0 or nbytes <= device:
            assert assigned.optim is Tier.DEVICE
            device -= nbytes if shard.optim else 0
        elif nbytes <= cpu:
            assert assigned.optim is Tier.CPU
            cpu -= nbytes
        else:
            assert assigned.optim is Tier.NVME


def test_one_state_can_span_three_tiers():
    shards = [ShardBytes(param=100, optim=200, grad=100)] * 6
    config = OffloadConfig("auto", max_in_device_bytes=800, max_in_cpu_bytes=650)
    tiers = assign_tiers(shards, config, config, Budgets())
    assert [assigned.param.value for assigned in tiers] == ["device"] * 6
    # 200 of the device are left, and 300 are needed.
    assert [assigned.optim.value for assigned in tiers] == ["cpu"] * 2 + ["nvme"] * 4
    assert [assigned.grad.value for assigned in tiers] == ["cpu"] * 2 + ["nvme"] * 4
