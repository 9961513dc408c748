"""Logs, files and output of ZeroMonitor in real fits."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import time
import warnings
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_zero.callbacks import ZeroMonitor
from lightning_zero.observe.metrics import flops_per_token
from lightning_zero.observe.recordings import read_step
from lightning_zero.record.spans import Kind
from tests.support.cells import ANY_STAGE
from tests.support.fitting import make_trainer, settings
from tests.support.models import GANModule, GPTModule, MLPModule
from tests.support.ranks import RankError
from tests.support.warm import run_ranks

RANKS = 2
GIB = 1024**3
SLEEP_S = 0.08
VALIDATION_S = 1.0
SPEEDS = ("samples_per_s", "tokens_per_s", "tflops_per_device")


class SlowModule(GPTModule):
    """Rank 1 is late in every batch, and evaluation is slow."""

    def training_step(self, batch, batch_idx):
        time.sleep(SLEEP_S * self.global_rank)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        time.sleep(VALIDATION_S)


class FailingModule(MLPModule):
    """Fails once, in its third batch."""

    has_failed = False

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and not self.has_failed:
            self.has_failed = True
            raise ArithmeticError("out of luck")
        return super().training_step(batch, batch_idx)


class Watcher(Callback):
    """Keeps the measurements of the engine."""

    def on_train_start(self, trainer, pl_module):
        self.written_before = trainer.strategy.memory_report().nvme_written_bytes

    def on_train_end(self, trainer, pl_module):
        engine = trainer.strategy.engine
        self.numel = sum(bucket.layout.numel for bucket in engine.plan.buckets)
        self.memory = engine.memory_report()


def watch(name, spec, module, monitor, logger=True, extra=(), **options):
    """Runs a fit; returns its output, logged rows, and measurements."""
    watcher = Watcher()
    trainer = make_trainer(
        spec,
        logger=CSVLogger(".", name, version="") if logger else False,
        callbacks=[monitor, watcher, *extra],
        default_root_dir=name,
        **options,
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer.fit(module)
    report = Path(name, "zero", "report.json")
    return {
        "printed": printed.getvalue(),
        "rows": rows(name),
        "numel": watcher.numel,
        "optimizer_bytes": watcher.memory.tiers["device"],
        "written_bytes": watcher.memory.nvme_written_bytes - watcher.written_before,
        "report": json.loads(report.read_text()) if report.exists() else None,
        "files": sorted(str(p.relative_to(name)) for p in Path(name).rglob("*") if p.is_file()),
    }


def rows(name):
    """Rows of the CSV file with metrics of the monitor: numbers by key."""
    path = Path(name, "metrics.csv")
    if not path.exists():
        return []
    with path.open(newline="") as file:
        found = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    return [row for row in found if any(key.startswith("zero_") for key in row)]


def every_stage(stage):
    module = SlowModule(ranks=RANKS, num_batches=4)
    monitor = ZeroMonitor(every_n_steps=1, detail=True, spread=True)
    return watch(f"stage{stage}", settings(stage), module, monitor)


def accumulating():
    """Six batches, two of which make a step, with an evaluation after the third."""
    module = SlowModule(ranks=RANKS, num_batches=6)
    options = {"accumulate_grad_batches": 2, "val_check_interval": 3, "limit_val_batches": 1}
    return watch(
        "accumulating", settings(2), module, ZeroMonitor(every_n_steps=1, detail=True), **options
    )


def failing():
    """A fit that fails on all ranks, and another with the same callback."""
    monitor, module = ZeroMonitor(every_n_steps=1, detail=True), FailingModule(ranks=RANKS)
    with pytest.raises(ArithmeticError):
        watch("failed", settings(3), module, monitor)
    return {**watch("again", settings(3), module, monitor), "before": rows("failed")}


def tracing():
    """Manual optimization with two optimizers, without a logger; two steps in each batch."""
    monitor = ZeroMonitor(every_n_steps=0, detail=True, trace_steps=[3, 50])
    return watch("traced", settings(2), GANModule(ranks=RANKS), monitor, logger=False)


def stepping_beside():
    """Steps and writes during the next forward, with a checkpoint in between."""
    Path("nvme").mkdir(exist_ok=True)
    nvme = {"device": "nvme", "nvme_path": str(Path("nvme").absolute()), "max_in_cpu_bytes": 0}
    spec = settings(2, offload_optimizer=nvme, overlap_step=True)
    saving = ModelCheckpoint("kept", every_n_train_steps=3, save_top_k=-1)
    options = {"enable_checkpointing": True, "extra": [saving], "max_epochs": 2}
    return watch(
        "beside", spec, GPTModule(ranks=RANKS), ZeroMonitor(every_n_steps=1, detail=True), **options
    )


def as_the_trainer_logs():
    module = MLPModule(ranks=RANKS, num_batches=7)
    monitor = ZeroMonitor(report=False, detail=True, grad_norms=False)
    options = {"log_every_n_steps": 3, "limit_train_batches": 6}
    return watch("seldom", settings(1, overlap_step=True), module, monitor, **options)


def unwritable():
    """An invalid file name: neither the recording nor the report can be written."""
    monitor = ZeroMonitor(every_n_steps=0, detail=True, trace_steps=[1], dirpath="a\0b")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        case = watch("unwritable", settings(3), MLPModule(ranks=RANKS), monitor)
    return {**case, "warnings": [str(warning.message) for warning in warned]}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"stage {stage}": lambda stage=stage: every_stage(stage) for stage in range(4)},
    "accumulating": accumulating,
    "failing": failing,
    "tracing": tracing,
    "unwritable": unwritable,
    "beside": stepping_beside,
    "seldom": as_the_trainer_logs,
}


# What stages 1 and 3 show by default, on ranks of their own.
SLOW_CASES = {"stage 0", "stage 2"}


def _run(rank, world_size, are_slow):
    cases = {name: case for name, case in CASES.items() if (name in SLOW_CASES) == are_slow}
    found = {name: case() for name, case in cases.items()}
    if rank == 0 and not are_slow:
        traced = read_step(Path("traced/zero/recordings"), 2)
        found["tracing"]["recordings"] = traced
    return found


@cache
def _watched(are_slow):
    return run_ranks(RANKS, _run, are_slow, has_group=False, timeout_s=120)


class Watched:
    """Measurements of a rank, by case."""

    def __init__(self, rank):
        self.rank = rank

    def __getitem__(self, name):
        return _watched(name in SLOW_CASES)[self.rank][name]


@pytest.fixture
def watched():
    """Measurements of rank 0, by case."""
    return Watched(0)


@pytest.mark.parametrize("stage", ANY_STAGE)
def test_a_late_rank_is_the_straggler_and_every_step_has_the_same_keys(watched, stage):
    steps = watched[f"stage {stage}"]["rows"]
    assert [row["step"] for row in steps] == [0, 1, 2, 3]
    assert len({tuple(sorted(row)) for row in steps}) == 1
    for row in steps[1:]:
        assert row["zero_straggler/rank"] == 1
        assert 0.02 <= row["zero_straggler/skew_s"] <= 0.5
        assert row["zero_time/step_s/min"] >= SLEEP_S
        assert row["zero_time/forward_s/max_rank"] in (0, 1)
        assert 0 < row["zero_time/optimizer_s/mean"] < row["zero_time/step_s/mean"]


@pytest.mark.parametrize("stage", ANY_STAGE)
def test_every_step_has_the_speed_of_all_ranks_since_the_one_before(watched, stage):
    module = GPTModule(ranks=RANKS)
    of_token = flops_per_token(module)
    assert of_token > 6 * 3 * 12 * 32**2  # blocks and output layer, without embedding
    for row in watched[f"stage {stage}"]["rows"]:
        samples, tokens, tflops = (row[f"zero_throughput/{name}"] for name in SPEEDS)
        assert tokens == pytest.approx(9 * samples)
        assert tflops * 1e12 * RANKS == pytest.approx(of_token * tokens)


@pytest.mark.parametrize("stage", ANY_STAGE)
def test_bytes_and_norms_of_a_step_are_those_of_the_stage(watched, stage):
    case = watched[f"stage {stage}"]
    last, half = case["rows"][-1], case["numel"] * 4 / RANKS / GIB
    if stage == 0:
        assert last["zero_comm/all_reduce_gib/mean"] == pytest.approx(2 * half)
    else:
        assert last["zero_comm/reduce_scatter_gib/mean"] == pytest.approx(half)
        gathered = last["zero_comm/all_gather_gib/min"]
        assert gathered == pytest.approx(half) if stage < 3 else half < gathered < 2 * half
    states = ("param", "grad", "optim")
    for name, (state, nbytes) in zip(states, case["optimizer_bytes"].items(), strict=True):
        assert last[f"zero_memory/device_{name}_gib/max"] == pytest.approx(nbytes / GIB), state
    norms = {key: value for key, value in last.items() if key.startswith("zero_grad_norm/")}
    total = norms.pop("zero_grad_norm/total")
    assert total > 0
    assert sum(norm**2 for norm in norms.values()) == pytest.approx(total**2)


@pytest.mark.parametrize("stage", ANY_STAGE)
def test_the_end_of_a_job_prints_memory_throughput_communication_and_files(watched, stage):
    case = watched[f"stage {stage}"]
    printed = case["printed"]
    assert "plain data parallel" in printed
    speed = r" samples/s, \d+ tokens/s, \S+ TFLOPS per device \(over 3 steps, without the first one"
    assert re.search(rf"{speed} and evaluation\)", " ".join(printed.split()))
    assert "mean of 3 recorded steps of" in printed
    assert f"stage{stage}/zero/report.json" in printed
    assert {"metrics.csv", "zero/report.json", "zero/memory.json"} <= set(case["files"])
    assert Watched(1)[f"stage {stage}"]["printed"] == ""


@pytest.mark.parametrize("stage", ANY_STAGE)
def test_the_report_has_what_is_needed_to_compare_runs(watched, stage):
    report = watched[f"stage {stage}"]["report"]
    assert (report["stage"], report["world_size"], report["num_nodes"]) == (stage, RANKS, 1)
    assert report["model"] == "SlowModule"
    assert report["device"] == "cpu"
    assert report["optimizer_tiers"] == report["parameter_tiers"] == ["device"]
    module = GPTModule(ranks=RANKS)
    assert report["parameters"] == sum(parameter.numel() for parameter in module.parameters())
    assert report["versions"]["torch"] == torch.__version__
    assert {"lightning_zero", "Lightning", "Python"} <= set(report["versions"])
    assert datetime.now(timezone.utc) - datetime.fromisoformat(report["date"]) < timedelta(hours=1)
    nbytes = sum(watched[f"stage {stage}"]["optimizer_bytes"].values())
    assert report["memory"]["largest_rank_bytes"] >= nbytes
    assert report["memory"]["peak_bytes"] > 0
    assert report["metrics"]["rising"] == 1.5
    assert report["transfers"]["agree"]["gib"] is None  # a few bytes, which are not counted


def test_micro_batches_make_one_window_which_an_evaluation_drops(watched):
    steps = watched["accumulating"]["rows"]
    assert [row["step"] for row in steps] == [0, 2]  # the third batch was of step 1
    assert not any(key.endswith(("/min", "/max_rank")) for key in steps[0])
    for row in steps:
        assert 2 * SLEEP_S <= row["zero_time/step_s/max"] < VALIDATION_S


def test_what_is_written_beside_the_next_forward_is_in_one_window_or_the_next(watched):
    steps = watched["beside"]["rows"]
    assert [row["step"] for row in steps] == list(range(8))
    assert not any("grad_norm" in key for key in steps[0])  # all gradients are on NVMe
    logged_gib = sum(row["zero_tier/nvme_write_gib/mean"] for row in steps) * GIB * RANKS
    written = sum(Watched(rank)["beside"]["written_bytes"] for rank in range(RANKS))
    assert logged_gib == pytest.approx(written)
    assert any(row["zero_time/optimizer_exposed_s/mean"] > 0 for row in steps)
    assert " optimizer " in watched["beside"]["printed"].replace("\n", " ")
    gathered = [row["zero_comm/all_gather_gib/mean"] for row in steps]
    assert sum(gathered) == pytest.approx(8 * watched["beside"]["numel"] * 4 / RANKS / GIB)


def test_after_an_exception_in_a_step_the_next_fit_is_monitored_as_the_first(watched):
    case = watched["failing"]
    assert [row["step"] for row in case["before"]] == [0, 1]
    assert [row["step"] for row in case["rows"]] == [0, 1, 2, 3]


def test_a_traced_step_is_written_for_every_rank_without_a_logger(watched):
    case = watched["tracing"]
    assert case["rows"] == []
    files = [name for name in case["files"] if "recordings" in name]
    assert files == [f"zero/recordings/step_2_rank_{rank}.json" for rank in range(RANKS)]
    assert {"zero/trace_step_2.json", "zero/trace_step_2.png"} <= set(case["files"])
    assert "trace_steps that were not reached: 50" in case["printed"]
    first, second = case["recordings"]
    assert (first.rank, second.rank) == (0, 1)
    steps = list(first.of(Kind.STEP))
    assert len(steps) >= 2
    assert first.nbytes(Kind.REDUCE_SCATTER) == second.nbytes(Kind.REDUCE_SCATTER) > 0


def test_a_file_that_cannot_be_written_neither_stops_training_nor_hangs_a_rank(watched):
    warned = [text for text in watched["unwritable"]["warnings"] if "not written" in text]
    assert warned == [
        "the recording was not written: ValueError: embedded null byte",
        "the report was not written: ValueError: embedded null byte",
    ]
    assert "plain data parallel" in watched["unwritable"]["printed"]


def test_the_trainer_sets_the_interval_and_the_report_can_be_disabled(watched):
    case = watched["seldom"]
    assert [row["step"] for row in case["rows"]] == [2, 5]
    assert case["printed"] == ""
    assert case["files"] == ["metrics.csv"]
    assert not any("grad_norm" in key for key in case["rows"][0])


# ---------------------------------------------------------------- one rank, and none


def _alone(rank, world_size):
    module = MLPModule(num_batches=3)
    spec = settings(2, offload_optimizer="cpu")
    return watch("alone", spec, module, ZeroMonitor(every_n_steps=1, detail=True, dirpath="other"))


def test_one_rank_has_plain_keys_and_its_own_directory():
    (case,) = run_ranks(1, _alone, has_group=False)
    last = case["rows"][-1]
    assert last["zero_memory/cpu_optim_gib"] > 0
    assert last["zero_time/step_s"] > 0
    assert not any("/max" in key or "straggler" in key or "comm" in key for key in last)
    assert "other/zero/report.json" in case["printed"]


class LeavingCallback(Callback):
    """Fails on rank 1 right before the metrics are gathered."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 1:
            raise ArithmeticError("out of luck")


def _leave(rank, world_size):
    callbacks = [LeavingCallback(), ZeroMonitor(every_n_steps=1, detail=True)]
    trainer = make_trainer(settings(2), callbacks=callbacks)
    trainer.fit(MLPModule(ranks=world_size))


def test_a_rank_that_fails_before_metrics_are_gathered_does_not_hang_the_others():
    start = time.monotonic()
    with pytest.raises(
        RankError, match="rank 0 stops because rank 1 raised ArithmeticError"
    ) as raised:
        run_ranks(RANKS, _leave, has_group=False)
    assert "ArithmeticError: out of luck" in str(raised.value)
    assert "did not return" not in str(raised.value)
    assert time.monotonic() - start < 20


def _with(rank, world_size, strategy, callbacks):
    make_trainer(strategy, callbacks=callbacks).fit(MLPModule())


def test_another_strategy_and_a_second_monitor_are_refused_before_training():
    with pytest.raises(RankError, match="ZeroMonitor needs a ZeroStrategy, got SingleDevice"):
        run_ranks(1, _with, "auto", [ZeroMonitor()], has_group=False)
    with pytest.raises(RankError, match="expected one ZeroMonitor, got several"):
        run_ranks(1, _with, "zero2", [ZeroMonitor(), ZeroMonitor(report=False)], has_group=False)


def _keys(rank, world_size, arguments):
    monitor, csv = ZeroMonitor(every_n_steps=1, report=False, **arguments), CSVLogger("run")
    make_trainer("zero3", callbacks=[monitor], logger=csv).fit(MLPModule(ranks=world_size))
    return sorted(csv.experiment.metrics_keys) if rank == 0 else None


def test_eight_metrics_are_logged_by_default_and_all_on_demand():
    keys, _ = run_ranks(2, _keys, {}, has_group=False)
    assert [key for key in keys if key.startswith("zero_")] == [
        "zero_grad_norm/total",
        "zero_memory/peak_gib/max",
        "zero_straggler/rank",
        "zero_straggler/skew_s",
        "zero_throughput/samples_per_s",
        "zero_time/step_s/max",
        "zero_wait/total_s/mean",
    ]
    more, _ = run_ranks(2, _keys, {"detail": True}, has_group=False)
    assert len(more) > 40
    with pytest.raises(ValueError, match="spread needs detail=True"):
        ZeroMonitor(spread=True)
