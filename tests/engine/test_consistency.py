"""Ranks with different models, optimizers or settings all raise the first difference."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, SGD, Adam

from lightning_zero import Engine, OffloadConfig, ZeroConfig
from lightning_zero.comm.consistency import check_equal
from lightning_zero.engine import beginning
from lightning_zero.engine.consistency import describe_optimizer
from lightning_zero.engine.optimizers import AttachedOptimizers
from lightning_zero.optim.probe import ProbeResult, StepKind
from tests.support import ranks
from tests.support.fitting import make_trainer, settings
from tests.support.models import MLPModule
from tests.support.warm import run_ranks


def layers(*widths):
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))


def frozen(module):
    module[1].requires_grad_(False)
    return module


def with_buffer(numel):
    module = layers(4, 4)
    module.register_buffer("seen", torch.zeros(numel))
    return module


def on_meta():
    with torch.device("meta"):
        return layers(4, 8, 4)


def in_list():
    module = nn.Module()
    module.layers = nn.ModuleList(layers(4, 8, 4))
    return module


def in_sequence():
    module = nn.Module()
    module.layers = layers(4, 8, 4)
    return module


def one(module, **options):
    return SGD(module.parameters(), **{"lr": 0.1, **options})


def two_groups(module, size):
    parameters = list(module.parameters())
    return SGD([{"params": parameters[:size]}, {"params": parameters[size:]}], lr=0.1)


# By case: what every rank builds (module, optimizers, config), and the error on all ranks.
MODELS = {
    "another shape": (
        lambda rank: layers(4, 8 + rank, 4),
        r"parameter 0\.weight: shape is \(8, 4\) on rank 0 and \(9, 4\) on rank 1",
    ),
    "a further layer": (
        lambda rank: layers(4, 8, *[8] * rank, 4),
        r"parameter 1\.weight: shape is \(4, 8\) on rank 0 and \(8, 8\) on rank 1",
    ),
    "a further layer at the end": (
        lambda rank: layers(4, 8, 4, *[4] * rank),
        r"parameter 2\.weight: it is missing on rank 0 and present on rank 1",
    ),
    "another dtype": (
        lambda rank: layers(4, 8, 4).to(torch.float64 if rank else torch.float32),
        r"parameter 0\.weight: dtype is torch\.float32 on rank 0 and torch\.float64 on rank 1",
    ),
    "another part frozen": (
        lambda rank: frozen(layers(4, 8, 4)) if rank else layers(4, 8, 4),
        r"parameter 1\.weight: requires_grad is True on rank 0 and False on rank 1",
    ),
    "another tie": (
        lambda rank: tied() if rank else layers(4, 4, 4),
        r"parameter 1\.weight: shape is \(4, 4\) on rank 0 and not set on rank 1",
    ),
    "another container": (
        lambda rank: in_list() if rank else in_sequence(),
        r"module layers: class is Sequential on rank 0 and ModuleList on rank 1",
    ),
    "another buffer": (
        lambda rank: with_buffer(3 + rank),
        r"buffer seen: shape is \(3,\) on rank 0 and \(4,\) on rank 1",
    ),
    "no values on one rank": (
        lambda rank: on_meta() if rank else layers(4, 8, 4),
        r"parameter 0\.weight: value is set on rank 0 and not set yet \(meta device\) on rank 1",
    ),
}


def tied():
    module = layers(4, 4, 4)
    module[1].weight = module[0].weight
    return module


def _refuse_models(rank, world_size, stage):
    for name, (build, text) in MODELS.items():
        module = build(rank)
        with pytest.raises(ValueError, match=text):
            Engine(
                module,
                [SGD(module.parameters(), lr=0.1)],
                ZeroConfig(stage=stage),
                device=torch.device("cpu"),
            )
        assert not any("_zero" in key for p in module.parameters() for key in vars(p)), name
    _train(layers(4, 8, 4), stage)


def _train(module, stage):
    engine = Engine(module, [SGD(module.parameters(), lr=0.1)], ZeroConfig(stage=stage))
    engine.backward(module(torch.ones(1, 4)).sum())
    engine.step()
    engine.close()


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_different_models_raise_the_first_difference_on_all_ranks_which_can_build_again(stage):
    run_ranks(2, _refuse_models, stage)


OPTIMIZERS = {
    "another class": (
        lambda module, rank: [(Adam if rank else SGD)(module.parameters(), lr=0.1)],
        r"optimizer 0: class is SGD on rank 0 and Adam on rank 1",
    ),
    "another lr": (
        lambda module, rank: [one(module, lr=0.1 * (1 + rank))],
        r"group 0 of optimizer 0 \(SGD\): lr is 0\.1 on rank 0 and 0\.2 on rank 1",
    ),
    "another lr in a tensor": (
        lambda module, rank: [one(module, lr=torch.tensor(0.5 * (1 + rank)))],
        r"lr is tensor\(0\.5\) on rank 0 and tensor\(1\.0\) on rank 1",
    ),
    "another decay": (
        lambda module, rank: [one(module, weight_decay=0.5 * rank)],
        r"weight_decay is 0 on rank 0 and 0\.5 on rank 1|weight_decay is 0\.0 on rank 0 and 0\.5",
    ),
    "another group split": (
        lambda module, rank: [two_groups(module, 2 - rank)],
        r"parameter 0\.bias in optimizer 0: group is 0 on rank 0 and 1 on rank 1",
    ),
    "more groups": (
        lambda module, rank: [two_groups(module, 2) if rank else one(module)],
        r"optimizer 0: number of groups is 1 on rank 0 and 2 on rank 1",
    ),
    "fewer parameters": (
        lambda module, rank: [SGD(list(module.parameters())[rank:], lr=0.1)],
        r"parameter 0\.weight in optimizer 0: it is present on rank 0 and missing on rank 1",
    ),
    "one more": (
        lambda module, rank: [SGD(layer.parameters(), lr=0.1) for layer in module[: 1 + rank]],
        r"optimizer 1: it is missing on rank 0 and present on rank 1",
    ),
}
SETTINGS = {
    "another stage": (lambda rank: ZeroConfig(stage=1 + rank), "stage is 1 on rank 0 and 2 on"),
    "groups on one rank": (
        lambda rank: ZeroConfig(sharding_group_size=1 if rank else None),
        "sharding_group_size is None on rank 0 and 1 on rank 1",
    ),
    "another size": (
        lambda rank: ZeroConfig(stage=1, reduce_bucket_size=100 + rank),
        "reduce_bucket_size is 100 on rank 0 and 101 on rank 1",
    ),
    "another offload": (
        lambda rank: ZeroConfig(
            stage=1, offload_optimizer=OffloadConfig("cpu", ratio=0.5 * (1 + rank))
        ),
        "offload_optimizer is device='cpu', ratio=0.5 on rank 0",
    ),
    "another dtype": (
        lambda rank: ZeroConfig(stage=1, param_dtype="bf16" if rank else None),
        r"param_dtype is None on rank 0 and torch\.bfloat16 on rank 1",
    ),
}


def _refuse_optimizers(rank, world_size, stage):
    for name, (build, text) in OPTIMIZERS.items():
        module = layers(4, 8, 4)
        with pytest.raises(ValueError, match=text):
            Engine(module, build(module, rank), ZeroConfig(stage=stage))
        if name != "one more":
            engine = Engine(module, config=ZeroConfig(stage=stage))
            with pytest.raises(ValueError, match=text):
                engine.attach(*build(module, rank))
            engine.close()
    _train(layers(4, 8, 4), stage)


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_different_optimizers_raise_the_first_different_option_also_later(stage):
    run_ranks(2, _refuse_optimizers, stage)


def _refuse_settings(rank, world_size):
    for build, text in SETTINGS.values():
        with pytest.raises(ValueError, match=text):
            Engine(layers(4, 8, 4), config=build(rank))


def test_different_settings_raise_the_first_one():
    run_ranks(2, _refuse_settings)


def _refuse_versions(rank, world_size):
    if rank:
        torch.__version__ = "2.11.0"
    with pytest.raises(ValueError, match=r"installed versions: torch is .* and 2\.11\.0 on rank 1"):
        Engine(layers(4, 8, 4))


def test_ranks_with_different_versions_are_an_error_that_names_them():
    ranks.run_ranks(2, _refuse_versions)


def _one_cannot(rank, world_size, stage):
    texts = []
    foreign = [nn.Parameter(torch.ones(13, 17))]
    for build in (
        lambda module: LBFGS(module.parameters()) if rank else one(module),
        lambda module: SGD([*module.parameters(), *foreign * rank], lr=0.1),
        lambda module: [one(module), "Adam"][rank],
    ):
        module = layers(4, 8, 4)
        with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
            Engine(module, build(module), ZeroConfig(stage=stage))
        texts.append(f"{type(error.value).__name__}: {error.value}")
    with pytest.raises((ValueError, RuntimeError), match=r"nothing to shard"):
        Engine(nn.Module() if rank else module, config=ZeroConfig(stage=stage))
    _train(module, stage)
    return texts


def test_an_error_of_one_rank_is_raised_on_the_others():
    texts, own = run_ranks(2, _one_cannot, 3)
    for text, cause in zip(texts, own, strict=True):
        assert text == f"RuntimeError: rank 1 could not begin: {cause}"
    assert "LBFGS" in own[0]
    assert "(13, 17)" in own[1]
    assert "optimizers must be a torch.optim.Optimizer or a list of them, got str" in own[2]


def _cannot_plan(*args, **kwargs):
    raise RuntimeError("no plan on this rank")


def _one_cannot_plan(rank, world_size):
    before = len(dist.distributed_c10d._world.pg_map)
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(beginning, "make_plan", _cannot_plan)
        with pytest.raises(RuntimeError, match="no plan on this rank"):
            Engine(layers(4, 8, 4))
    assert len(dist.distributed_c10d._world.pg_map) == before
    _train(layers(4, 8, 4), 3)


def test_an_error_after_the_groups_were_opened_closes_them_and_reaches_the_others():
    run_ranks(2, _one_cannot_plan)


def _build_with_allowed_differences(rank, world_size):
    """Builds with the allowed differences: values, seeds, metrics, order in a group, folders."""
    torch.manual_seed(rank)
    module = layers(4, 8, 4)
    if rank == 0:
        module.metric = nn.Sequential(nn.ReLU())
    parameters = list(module.parameters())
    group = {"params": parameters[:: 1 - 2 * rank], "seed": rank, "hook": lambda: rank}
    optimizer = SGD([group], lr=0.1)
    Path(f"node{rank}").mkdir()
    offload = OffloadConfig("nvme", nvme_path=f"node{rank}")
    engine = Engine(module, [optimizer], ZeroConfig(stage=1, offload_optimizer=offload))
    engine.backward(module(torch.ones(1, 4)).sum())
    engine.step()
    engine.close()
    return [float(parameter.sum()) for parameter in parameters]


def test_ranks_may_differ_in_values_seeds_metrics_and_folders():
    first, second = run_ranks(2, _build_with_allowed_differences)
    assert first == second


class DifferentModule(MLPModule):
    """Differs on rank 1 in one respect."""

    def __init__(self, what, is_late=False, **kwargs):
        super().__init__(**kwargs)
        self.what = what
        self.is_late = is_late
        if not is_late:
            self.build()

    def build(self):
        wide = 4096 + 32 * (self.rank == 1 and self.what == "shape")
        further = [nn.Linear(64, 64) for _ in range(self.rank == 1 and self.what == "layer")]
        self.more = nn.Sequential(*further, nn.Linear(1, wide), nn.Linear(64, 64))

    @property
    def rank(self):
        return int(os.environ["RANK"])

    def configure_model(self):
        if self.is_late and not hasattr(self, "more"):
            self.build()

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.1 * (1 + (self.rank == 1 and self.what == "lr")))


def _fit(rank, world_size, stage, what, is_late, options):
    module = DifferentModule(what, is_late, ranks=world_size)
    mine = options if rank else {}
    precision = "bf16-mixed" if what == "precision" and rank else "32-true"
    try:
        make_trainer(settings(mine.pop("stage", stage), **mine), precision=precision).fit(module)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


MEANT = {
    "shape": r"parameter more.0.weight: shape is (4096, 1) on rank 0 and (4128, 1) on rank 1",
    "layer": r"parameter more.0.weight: shape is (4096, 1) on rank 0 and (64, 64) on rank 1",
    "lr": "group 0 of optimizer 0 (SGD): lr is 0.1 on rank 0 and 0.2 on rank 1",
    "precision": "ZeroStrategy: precision is 32-true on rank 0 and bf16-mixed on rank 1",
}


@pytest.mark.default_cases("3-precision-False", "3-shape-True")
@pytest.mark.parametrize(
    ("stage", "what", "is_late"),
    [
        *((stage, what, False) for stage in (0, 1, 3) for what in ("shape", "layer")),
        *((3, what, True) for what in ("shape", "layer")),
        (3, "lr", False),
        (3, "precision", False),
    ],
)
def test_a_trainer_whose_ranks_differ_ends_on_all_with_the_first_difference(stage, what, is_late):
    for text in ranks.run_ranks(2, _fit, stage, what, is_late, {}, has_group=False):
        assert text is not None
        assert text.startswith("ValueError: ranks differ in")
        assert MEANT[what] in text


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"stage": 1}, "stage is 3 on rank 0 and 1 on rank 1"),
        ({"checkpoint": "sharded"}, "checkpoint is auto on rank 0 and sharded on rank 1"),
    ],
)
def test_strategies_with_different_settings_end_before_the_module_is_built(options, meant):
    for text in ranks.run_ranks(2, _fit, 3, "nothing", True, options, has_group=False):
        assert text is not None
        assert text.startswith("ValueError: ranks differ in ZeroStrategy")
        assert meant in text


def test_the_first_difference_is_that_of_the_one_rank_that_differs():
    same, other = {"a": {"x": "1"}, "b": {"x": "2"}}, {"b": {"x": "2"}, "a": {"x": "1"}}
    with pytest.raises(ValueError, match="a on ranks 0, 2 and b on rank 1 comes first"):
        check_equal([same, other, same])
    with pytest.raises(ValueError, match="b: x is 2 on ranks 0, 1 and 3 on rank 2"):
        check_equal([same, same, {**same, "b": {"x": "3"}}])
    check_equal([same, dict(same)])


def test_options_without_a_repr_of_their_own_are_named_by_their_class():
    module = layers(2, 2)
    optimizer = SGD([{"params": module.parameters(), "f": print, "g": lambda: 0}], lr=0.1)
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = ProbeResult(StepKind.AT_ONCE, is_elementwise=True)
    options = describe_optimizer(0, optimizer, found, names)["group 0 of optimizer 0 (SGD)"]
    assert options["f"] == "<built-in function print>"
    assert options["g"] == "function"


@pytest.mark.parametrize("stage", [1, 3])
def test_one_optimizer_needs_no_list(stage):
    module = layers(4, 4)
    engine = Engine(module, optimizers=one(module), config=ZeroConfig(stage=stage))
    assert len(engine.optimizers) == 1
    engine.close()
    with pytest.raises(TypeError, match=r"a torch\.optim\.Optimizer or a list of them, got str"):
        Engine(module, optimizers="Adam")


def test_a_failed_construction_leaves_no_hooks_and_no_files(tmp_path, monkeypatch):
    """Its parameters are then unusable, and an error gives the cure."""
    module = layers(4, 8, 4)
    forwards = [layer.forward for layer in module]

    def fail(*args):
        raise RuntimeError("no optimizer can be added")

    monkeypatch.setattr(AttachedOptimizers, "add", fail)
    config = ZeroConfig(
        3,
        activation_checkpointing=["Linear"],
        offload_optimizer=OffloadConfig("nvme", nvme_path=str(tmp_path)),
    )
    with pytest.raises(RuntimeError, match="no optimizer can be added"):
        Engine(module, [Adam(module.parameters())], config)
    assert not list(tmp_path.iterdir())
    assert [layer.forward for layer in module] == forwards
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in module.modules())
    with pytest.raises(ValueError, match="If the other engine could not be made, build a new"):
        Engine(module)
