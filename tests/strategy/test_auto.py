"""`stage="auto"` and the memory check, for all amounts of memory, without a device."""

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from examples.gpt import GPT, GPTConfig
from lightning_zero import ZeroConfig, ZeroStrategy
from lightning_zero.strategy import settings as strategy_settings
from lightning_zero.strategy.settings import (
    AvailableMemory,
    Hardware,
    auto_base,
    check_memory_fits,
    choose,
)
from tests.support import ranks
from tests.support.fitting import assert_same, fit, fit_reference, make_trainer, settings
from tests.support.models import MLPModule

GIB = 1024**3
OF_TWO_RANKS = partial(MLPModule, ranks=2)
CUDA, CPU = (Hardware(torch.device(name), 8, 8) for name in ("cuda", "cpu"))


@pytest.fixture(scope="module")
def model():
    """1.2 B parameters: 19.3 GB of states in float32, 8.5 GiB of them parameters and gradients."""
    with torch.device("meta"):
        return GPT(GPTConfig(width=2048, num_layers=24, num_heads=16, context=1024))


def memory(device_gib, host_gib=64, disk_gib=0):
    device, host, disk = (int(x * GIB) for x in (device_gib, host_gib, disk_gib))
    return AvailableMemory(device, device, host, host, disk)


def chosen(model, memory, base=None, hardware=CUDA):
    optimizer = torch.optim.AdamW(model.parameters())
    return choose(model, [optimizer], base or ZeroConfig(), memory, hardware)


def devices(config):
    return tuple(None if offload is None else offload.device for offload in config.offloads)


@pytest.mark.default_cases("10-512-0-2-offloads1")
@pytest.mark.parametrize(
    ("device_gib", "host_gib", "disk_gib", "stage", "offloads"),
    [
        (80, 512, 0, 2, (None, None)),
        (10, 512, 0, 2, (None, None)),
        (5, 512, 0, 3, (None, None)),
        (2, 512, 0, 3, (None, "cpu")),
        (1.5, 512, 0, 3, ("cpu", "cpu")),
        (1.5, 16, 512, 3, ("nvme", "nvme")),
    ],
)
def test_the_fastest_that_fits_is_chosen(model, device_gib, host_gib, disk_gib, stage, offloads):
    found = chosen(model, memory(device_gib, host_gib, disk_gib))
    assert found.config.stage == stage
    assert devices(found.config) == offloads
    assert f"stage {stage}" in found.reason
    assert f"{device_gib:.2f} GiB" in found.reason


def test_a_reason_names_what_would_be_faster_and_what_it_lacks(model):
    reason = chosen(model, memory(5)).reason
    assert "stage2 would be faster but lacks" in reason
    assert "of device memory" in reason


def test_files_are_chosen_only_where_a_folder_is_set(model):
    found = chosen(model, memory(0.5, host_gib=1, disk_gib=0))
    assert "nvme" not in devices(found.config)
    assert "no choice leaves memory" in found.reason


def test_offloads_that_a_user_has_set_are_kept(model):
    base = auto_base({"offload_optimizer": "cpu"})
    found = chosen(model, memory(80), base)
    assert devices(found.config) == (None, "cpu")
    base = auto_base({"offload_optimizer": "cpu", "offload_param": "cpu"})
    assert chosen(model, memory(80), base).config.stage == 3


def test_on_the_cpu_both_tiers_are_one_memory(model):
    found = chosen(model, memory(6), hardware=CPU)
    assert devices(found.config) == (None, None)


def test_settings_of_one_stage_are_left_out_in_another(model):
    found = chosen(model, memory(80), auto_base({"prefetch_bucket_size": 7}))
    assert found.config.stage == 2
    assert found.config.prefetch_bucket_size is None


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"stage": "auto", "reduce_bucket_size": -1}, ValueError, "reduce_bucket_size must be"),
        ({"stage": "three"}, TypeError, "stage must be one of 0, 1, 2, 3, got 'three'"),
    ],
)
def test_wrong_settings_are_refused_when_the_strategy_is_made(arguments, error, text):
    with pytest.raises(error, match=text):
        ZeroStrategy(**arguments)


# ---------------------------------------------------------------- the memory check


def refuse(model, config, memory, hardware=CUDA):
    optimizer = torch.optim.AdamW(model.parameters())
    check_memory_fits(model, [optimizer], config, memory, hardware)


def test_what_fits_by_states_alone_is_not_refused(model):
    refuse(model, ZeroConfig(stage=3), memory(2.3))
    refuse(model, ZeroConfig(stage=0), memory(18.5))


def test_states_that_cannot_fit_are_refused_with_what_would(model):
    with pytest.raises(ValueError) as caught:
        refuse(model, ZeroConfig(stage=1), memory(6))
    text = str(caught.value)
    assert "GiB on each device, which has 6.00 GiB" in text
    lines = [line for line in text.splitlines() if "ZeroStrategy(" in line]
    assert len(lines) == 3
    assert "ZeroStrategy(stage=3)" in text
    assert 'ZeroStrategy(stage=2, offload_optimizer="cpu")' in text


def test_the_error_reports_that_nothing_would_fit(model):
    with pytest.raises(ValueError, match="more ranks, or a smaller model"):
        refuse(model, ZeroConfig(stage=0), memory(0.1, host_gib=0.1))


def test_an_offload_that_adapts_to_the_memory_is_not_refused(model):
    refuse(model, ZeroConfig(stage=1, offload_optimizer="auto"), memory(1))


def test_states_of_an_optimizer_that_cannot_be_probed_are_not_counted(model):
    class Odd(torch.optim.SGD):
        def step(self, closure):
            return closure()

    check_memory_fits(model, [Odd(model.parameters())], ZeroConfig(stage=0), memory(12), CUDA)


def test_a_run_that_cannot_fit_is_refused_before_it_begins(monkeypatch):
    monkeypatch.setattr(strategy_settings, "_physical_bytes", lambda: 1000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=r"model states do not fit: .* KiB|do not fit"):
            make_trainer(settings(3)).fit(MLPModule())


# ---------------------------------------------------------------- training


def _fit_with_auto(rank, world_size):
    # Ranks have different amounts of memory; the least decides.
    strategy_settings.available_memory_bytes = lambda: (10 + 20 * rank) * 2**20
    logger = CSVLogger("logs", version=0)
    strategy = ZeroStrategy(stage="auto")
    outcome = fit(
        rank,
        world_size,
        "ddp",
        OF_TWO_RANKS,
        {"strategy": strategy, "logger": logger},
        is_saving=True,
    )
    hyperparameters = Path("logs/lightning_logs/version_0/hparams.yaml").read_text()
    return outcome, strategy.config, strategy._settings.choice.reason, hyperparameters


def test_training_goes_on_with_one_choice_that_is_written_down():
    by_rank = ranks.run_ranks(2, _fit_with_auto, has_group=False)
    outcomes = [outcome for outcome, *_ in by_rank]
    assert_same(outcomes, fit_reference(2, OF_TWO_RANKS))
    assert len({reason for _, _, reason, _ in by_rank}) == 1
    assert len({config.stage for _, config, _, _ in by_rank}) == 1
    _, config, reason, hyperparameters = by_rank[0]
    assert f"zero_stage: {config.stage}" in hyperparameters
    note = outcomes[0].checkpoint["lightning_zero"]["auto"]
    assert note["zero_stage"] == config.stage
    assert note["reason"] == reason
    assert "0.00 GiB that are free on each of 2 devices" in reason
