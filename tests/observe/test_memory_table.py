"""The text of MemoryTable."""

import contextlib
import io

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_zero.callbacks import MemoryTable
from lightning_zero.layout.memory import MemoryReport
from lightning_zero.layout.stage import State
from lightning_zero.observe.report import memory_table
from tests.support.warm import run_ranks

MIB = 1024**2


def cells(line):
    return " ".join(line.split())


def table(tiers, ranks, data_parallel):
    """Table of bytes by rank, tier and state."""
    reports = [
        MemoryReport(
            rank,
            len(ranks),
            {
                t: dict(zip(State, states, strict=True))
                for t, states in zip(tiers, own, strict=True)
            },
            dict(zip(State, data_parallel, strict=True)),
        )
        for rank, own in enumerate(ranks)
    ]
    return memory_table(reports, num_steps=1)


def fit(strategy):
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=[MemoryTable()],
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = BoringModel()
    model.layer = torch.nn.Sequential(torch.nn.Linear(32, 1024), torch.nn.Linear(1024, 2))
    trainer.fit(model)


def test_the_table_is_printed_when_training_ends(capsys):
    (report,) = run_ranks(1, _fit_and_read, has_group=False)
    header, rank, replicated = report.strip().splitlines()[-3:]
    assert cells(header) == "MiB at the optimizer step parameters gradients optimizer total ratio"
    assert rank.startswith("rank 0")
    assert replicated.startswith("plain data parallel")
    # At the same moment: on one rank, stage 3 holds what data parallel holds, with gradients.
    assert rank.split()[2:-1] == replicated.split()[3:-1]
    assert rank.split()[3] == "0.14"


def _fit_and_read(rank, world_size):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        fit("zero3")
    return printed.getvalue()


def test_every_tier_has_columns_for_the_states_that_some_rank_keeps():
    quarter = [[MIB, MIB, 0], [0, 0, 2 * MIB]]
    lines = table(["device", "cpu"], [quarter], [4 * MIB, 4 * MIB, 8 * MIB]).splitlines()
    assert "optimizer (cpu)" in lines[0]
    assert cells(lines[1]) == "rank 0 1.00 1.00 0.00 2.00 4.00 0.250"
    assert cells(lines[2]) == "plain data parallel 4.00 4.00 8.00 0.00 16.00 1.000"


def test_another_strategy_is_refused_before_training():
    with pytest.raises(TypeError, match="needs a ZeroStrategy, got SingleDeviceStrategy; use"):
        fit(SingleDeviceStrategy("cpu"))


def test_one_tier_needs_no_name_and_each_of_eight_ranks_has_a_row():
    text = table(["device"], [[[MIB, MIB, 2 * MIB]]] * 8, [8 * MIB, 8 * MIB, 16 * MIB])
    header, *ranks, replicated = text.splitlines()
    assert cells(header) == "MiB at the optimizer step parameters gradients optimizer total ratio"
    assert [line.split()[:2] for line in ranks] == [["rank", str(rank)] for rank in range(8)]
    assert {line.split()[-1] for line in ranks} == {"0.125"}
    assert replicated.split()[-1] == "1.000"
    assert len({len(line) for line in text.splitlines()}) == 1


def test_beyond_eight_ranks_the_least_and_the_most_are_shown():
    ranks = [[[MIB, MIB, rank * MIB]] for rank in range(100)]
    header, least, most, _replicated = table(["device"], ranks, [MIB, MIB, 100 * MIB]).splitlines()
    assert cells(least) == "min of 100 ranks 1.00 1.00 0.00 2.00 0.020"
    assert cells(most) == "max of 100 ranks 1.00 1.00 99.00 101.00 0.990"


def test_a_model_without_state_does_not_divide_by_zero():
    assert table(["device"], [[[0, 0, 0]]], [0, 0, 0]).splitlines()[1].split()[-1] == "0.000"
