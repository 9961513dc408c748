"""The callback Fingerprints and `lightning-zero compare`, with DDP as the other run."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.strategies import FSDPStrategy

from lightning_zero.callbacks import Fingerprints
from lightning_zero.cli import main
from tests.support.fitting import fit, settings
from tests.support.models import GANModule, MLPModule
from tests.support.warm import run_ranks


class Corrupt(Callback):
    """Scales the mean gradient of one parameter on rank 1 before its step."""

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == 2 and trainer.global_rank == 1:
            for bucket in trainer.strategy.engine.buckets:
                for index in range(len(bucket.parameters)):
                    bucket.grads.fetch(index).mul_(1.001)


def _fits(rank, world_size, root, specs, factory, options):
    """Trains under each strategy of `specs`, one after the other, in a folder of its own."""
    for name, spec in specs.items():
        callbacks = [Fingerprints(gradients=True, dirpath=root / name)]
        if name == "corrupt":
            callbacks.insert(0, Corrupt())
        fit(rank, world_size, spec, factory, {"callbacks": callbacks, **options})


NVME = {"device": "nvme", "nvme_path": "."}
SPECS = {
    "ddp": "ddp",
    "zero0": settings(0),
    "zero1": "zero1",
    "zero2": settings(2, reduce_bucket_size=50),
    "zero3": "zero3",
    "zero3_offload": "zero3_offload",
    "zero3_nvme": settings(3, offload_optimizer=NVME, offload_param=NVME),
    "corrupt": "zero3",
}


@pytest.mark.parametrize(
    ("names", "num_steps"),
    [
        (["ddp", "zero1", "zero3", "corrupt"], 4),
        pytest.param(list(SPECS), 20, marks=pytest.mark.slow),
    ],
    ids=["few", "all"],
)
def test_every_stage_and_tier_is_equal_to_ddp_and_a_wrong_gradient_is_named(
    names, num_steps, tmp_path, capsys
):
    factory, specs = partial(MLPModule, ranks=2), {name: SPECS[name] for name in names}
    options = {"max_epochs": 5, "max_steps": num_steps}
    run_ranks(2, _fits, tmp_path, specs, factory, options, has_group=False, timeout_s=240)
    ddp = str(tmp_path / "ddp")
    for name in specs:
        status = main(["compare", ddp, str(tmp_path / name)])
        printed = capsys.readouterr().out
        if name == "corrupt":
            assert (status, printed.startswith("step 3: gradient ")) == (1, True), printed
        else:
            assert (name, status) == (name, 0), printed
            assert f"steps, 0 to {num_steps}, are equal bit by bit" in printed
    assert main(["compare", ddp, str(tmp_path / "corrupt"), "--rtol", "0.1"]) == 0


def test_two_optimizers_on_one_process_are_compared_step_by_step(tmp_path):
    specs = {"plain": "auto", "zero2": "zero2"}
    run_ranks(1, _fits, tmp_path, specs, GANModule, {}, has_group=False)
    assert main(["compare", *(str(tmp_path / name) for name in specs)]) == 0


def line(step, name="w", digest="1", norm=2.0, kind="parameter"):
    found = {"step": step, "kind": kind, "name": name, "norm": norm, "sum": 1.0}
    return json.dumps(found | {"digest": digest}) + "\n"


@pytest.mark.parametrize(
    ("second", "options", "status", "text"),
    [
        ([line(1), line(2, digest="7"), line(2)], [], 0, "2 steps, 1 to 2, are equal bit by bit"),
        (
            [line(1)],
            [],
            0,
            "lacks the parameters of 1 steps of the other, the first is step 2",
        ),
        (  # it ended before the step, or did not ask for gradients
            [line(1), line(2, kind="gradient")],
            [],
            0,
            "first.jsonl lacks the gradients of 1 steps of the other, the first is step 2",
        ),
        ([line(1), line(2, digest="7")], [], 1, "step 2: parameter w: norm 2.0 and 2.0, sum 1.0"),
        ([line(1), line(2, "v")], [], 1, "step 2: parameter w: only in the first run"),
        ([line(1, digest="7", norm=2.1)], ["--rtol", "0.1"], 0, "equal to rtol=0.1"),
        ([line(1, digest="7", norm=float("nan"))], ["--rtol", "0.1"], 1, "norm 2.0 and nan"),
        ([line(7)], [], 2, "have no step in common"),
        ([line(1), line(2)[:30]], [], 2, "ended while it was written"),
        (["{}\n"], [], 2, "line 1 of"),
        ([line(1, norm="high")], [], 2, "line 1 of"),
        ([line(1, name=None)], [], 2, "line 1 of"),
        ([line(1.5)], [], 2, "line 1 of"),
        (["[" * 100_000], [], 2, "line 1 of"),
        (["\udcff"], [], 2, "line 1 of"),
        ([line(1), line(2, "\x1b[31m")], [], 1, r"parameter \x1b[31m: only in the second run"),
        ([], [], 2, "have no step in common"),
        (None, [], 2, "lightning_zero.callbacks.Fingerprints() writes it"),
    ],
)
def test_the_first_difference_is_named(second, options, status, text, tmp_path, capsys):
    first, other = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    first.write_text(line(1) + line(2))
    if second is not None:
        other.write_text("".join(second), errors="surrogateescape")
    assert main(["compare", str(first), str(other), *options]) == status
    printed = capsys.readouterr()
    assert text in printed.out + printed.err


@pytest.mark.parametrize(
    ("weight", "step", "kind", "status"),
    [
        (2.0, 1, "gradient", 0),
        (1e-5, 1, "gradient", 1),
        (float("inf"), 1, "gradient", 1),
        (2.0, 2, "gradient", 1),
        (2.0, 1, "parameter", 1),
    ],
)
def test_a_norm_that_is_tiny_beside_that_of_another_gradient_may_differ(
    weight, step, kind, status, tmp_path
):
    for path, norm in ((tmp_path / "first", 6.8e-9), (tmp_path / "second", 5.7e-9)):
        tiny = line(1, "bias", str(norm), norm, "gradient")
        path.write_text(tiny + line(step, norm=weight, kind=kind))
    paths = str(tmp_path / "first"), str(tmp_path / "second")
    assert main(["compare", *paths, "--rtol", "1e-5"]) == status


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"every_n_steps": 0}, ValueError),
        ({"every_n_steps": None}, TypeError),
        ({"max_steps": 1.5}, TypeError),
        ({"gradients": 1}, TypeError),
    ],
)
def test_wrong_arguments_are_refused(arguments, error):
    with pytest.raises(error, match=next(iter(arguments))):
        Fingerprints(**arguments)


def test_a_strategy_that_shards_in_another_way_is_refused():
    trainer = SimpleNamespace(strategy=FSDPStrategy())
    with pytest.raises(TypeError, match="got FSDPStrategy"):
        Fingerprints().setup(trainer, MLPModule(), "fit")
