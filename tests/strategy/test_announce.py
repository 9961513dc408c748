"""At set-up rank 0 logs one line: the stage, the ranks, and the memory of the model states."""

from __future__ import annotations

import logging
import re
from functools import partial

import lightning_utilities.core.rank_zero as rank_zero
import pytest
from lightning.fabric import Fabric
from lightning.pytorch import Callback

import lightning_zero  # noqa: F401  # registers the names
from tests.support.fitting import make_trainer, settings
from tests.support.loops import build
from tests.support.models import GPTModule
from tests.support.warm import run_ranks

OF_ALL_RANKS = partial(GPTModule, ranks=2)
LINE = re.compile(
    r"zero(?P<stage>\d): (?P<count>\d+) (?P<pieces>unit|bucket)s?, 2 ranks( in groups of 1)?, "
    r"(?P<own>[\d.]+) KiB of (?P<kind>[a-z ]+) per rank(?P<places> \(.*\))?"
    r"( instead of (?P<ddp>[\d.]+) with DDP)?"
)


class _Lines(logging.Handler):
    """Keeps the lines about ZeRO that this rank logs."""

    def __init__(self):
        super().__init__()
        self.lines = []
        rank_zero.log.setLevel(logging.INFO)
        rank_zero.log.addHandler(self)

    def emit(self, record):
        if record.getMessage().startswith("zero"):
            self.lines.append(record.getMessage())


class _Count(Callback):
    """Counts the bytes that this rank holds when its gradients are complete and states exist."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        report = trainer.strategy.memory_report()
        self.own_bytes, self.ddp_bytes = report.total_bytes, report.data_parallel_bytes


def _fit_and_evaluate(rank, world_size, specs):
    found = []
    for spec in specs:
        module, count = OF_ALL_RANKS(), _Count()
        trainer = make_trainer(spec, max_steps=2, limit_val_batches=1, callbacks=[count])
        lines = _Lines()
        trainer.fit(module)
        trainer.validate(module, module.train_dataloader(), verbose=False)
        rank_zero.log.removeHandler(lines)
        found.append((lines.lines, count.own_bytes, count.ddp_bytes))
    return found


@pytest.fixture(scope="module")
def fits():
    specs = [settings(stage) for stage in range(4)]
    specs += [settings(3, sharding_group_size=1), settings(2, offload_optimizer="cpu")]
    return run_ranks(2, _fit_and_evaluate, specs, has_group=False)


def test_rank_0_alone_logs_one_line_for_each_run(fits):
    first, second = fits
    assert [len(lines) for lines, *_ in first] == [2] * len(first)
    assert not any(lines for lines, *_ in second)
    assert all(LINE.fullmatch(line) for lines, *_ in first for line in lines), first


def test_the_line_has_the_bytes_that_a_step_holds(fits):
    for lines, own_bytes, ddp_bytes in fits[0]:
        line = LINE.fullmatch(lines[0])
        assert line["kind"] == "model states"
        assert float(line["own"]) == pytest.approx(own_bytes / 1024, abs=0.06)
        if line["stage"] != "0":
            assert float(line["ddp"]) == pytest.approx(ddp_bytes / 1024, abs=0.06)


def test_the_line_counts_units_in_stage_3_and_buckets_in_the_others(fits):
    found = [LINE.fullmatch(lines[0]) for lines, *_ in fits[0]]
    assert [line["pieces"] for line in found[:4]] == ["bucket", "bucket", "bucket", "unit"]
    assert int(found[3]["count"]) > 1


def test_the_line_of_an_evaluation_counts_parameters_alone(fits):
    line = LINE.fullmatch(fits[0][3][0][1])
    assert line["kind"] == "parameters"
    assert float(line["own"]) == pytest.approx(float(line["ddp"]) / 2, rel=0.05)


def test_the_line_names_the_places_of_offloaded_states(fits):
    line = LINE.fullmatch(fits[0][-1][0][0])
    assert "on its device" in line["places"]
    assert "in CPU memory" in line["places"]


def _set_up(rank, world_size):
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy="zero3")
    fabric.launch()
    lines = _Lines()
    fabric.setup(*build())
    return lines.lines


def test_fabric_logs_the_line_too():
    first, second = run_ranks(2, _set_up, has_group=False)
    assert len(first) == 1
    assert LINE.fullmatch(first[0]), first
    assert not second
