"""The planner counts the same bytes as an engine, on every rank."""

from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_zero import ZeroConfig
from lightning_zero.engine.expected import expected_bytes
from lightning_zero.engine.shadow import Shadow
from lightning_zero.layout.names import parameters_by_name
from lightning_zero.layout.offload import Tier
from lightning_zero.optim.probe import find_full_optimizers
from lightning_zero.optim.state_sizes import OptimizerStates
from lightning_zero.planner import Choice, EngineRuns, Machine, estimate, make_optimizers
from lightning_zero.planner.choices import plan_of
from lightning_zero.planner.engine_run import RankOfGroup
from tests.support.cells import slow_but
from tests.support.planned import MODELS, OPTIMIZERS, choices, loss_of, train
from tests.support.warm import run_ranks

PRECISIONS = {
    "fp32": {},
    "bf16": {"param_dtype": "bf16", "keep_float32": "autocast"},
    "bf16, reduced so": {"param_dtype": "bf16", "reduce_dtype": "bf16"},
}


def planned(name, config, optimizer="adamw", world_size=2, num_micro_batches=1, averages=()):
    """Runs of the engine, and its machine."""
    with torch.device("meta"):
        module = MODELS[name].build()
    optimizers = OPTIMIZERS[optimizer](module)
    runs = EngineRuns(
        module,
        optimizers,
        partial(loss_of, batch=MODELS[name].batch()),
        num_micro_batches=num_micro_batches,
        autocast=torch.bfloat16 if config.param_dtype is not None else None,
        full_optimizers=find_full_optimizers(optimizers, config),
        averages=averages,
    )
    return runs, Machine(world_size, world_size, has_device_memory=False)


def by_name(tiers):
    return {tier.value: dict(states) for tier, states in tiers.items()}


def _count(rank, world_size, cases, num_micro_batches):
    """Bytes that the engine counts after two steps, by case."""
    Path("swap").mkdir(exist_ok=True)
    found = []
    for name, config, optimizer in cases:
        trained = train(name, config, optimizer, num_micro_batches=num_micro_batches)
        report = trained.engine.memory_report()
        found.append(({t: dict(s) for t, s in report.tiers.items()}, report.buffer_bytes))
        trained.engine.close()
    return found


def check(cases, world_size, *, optimizer="fused adamw", num_micro_batches=1):
    """Compares what the planner's run counts, and what is computed before a run, with an engine.

    Args:
        cases: Model and config, and optionally the optimizer.
        world_size: Number of ranks.
        optimizer: Optimizer of cases without one.
        num_micro_batches: Number of micro-batches in a step.
    """
    cases = [(*case, optimizer)[:3] for case in cases]
    counted = run_ranks(world_size, _count, cases, num_micro_batches, timeout_s=900)
    for case, of_ranks in zip(cases, zip(*counted, strict=True), strict=True):
        name, config, optimizer = case
        # A fused optimizer refuses meta tensors; its states are those of the unfused one.
        name_of_unfused = optimizer.removeprefix("fused ")
        runs, machine = planned(name, config, name_of_unfused, world_size, num_micro_batches)
        full, optimizers = runs.full_optimizers, runs.optimizers
        plan = plan_of(config, runs.module, optimizers, world_size, full)
        accumulates = num_micro_batches > 1
        for rank, (tiers, buffer_bytes) in enumerate(of_ranks):
            run = runs.count(config, RankOfGroup(rank, world_size, False))
            assert (by_name(run.held), run.nvme_buffer_bytes) == (tiers, buffer_bytes), (case, rank)
        named = parameters_by_name(runs.module)
        expected = expected_bytes(
            plan, named, optimizers, has_device_memory=False, accumulates=accumulates
        )
        for rank, tiers in enumerate(expected.by_rank):
            assert by_name(tiers) == of_ranks[rank][0], (case, rank)
        ranks = estimate(Choice("", "", config), runs, machine).ranks
        for tier in Tier if len(ranks.by_rank) > 1 else ():
            sums = [sum(tiers.get(tier.value, {}).values()) for tiers, _ in of_ranks]
            assert ranks.min_max_bytes(tier) == (min(sums), max(sums)), case


def cells():
    """Twelve cells: each model in two of the stages and offloads."""
    everything = choices()
    return [
        (name, everything[(5 * number + 8 * second) % len(everything)])
        for number, name in enumerate(MODELS)
        for second in range(2)
    ]


@pytest.mark.parametrize("every", [6, pytest.param(3, marks=pytest.mark.slow)])
def test_some_cells_are_counted_to_the_byte(every):
    check(cells()[::every], 2)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_twelve_cells_are_counted_to_the_byte(world_size):
    check(cells(), world_size)


@pytest.mark.slow
def test_every_model_stage_and_offload_is_counted_to_the_byte():
    """Some choices for each model; the slow test below has all of them."""
    everything = choices()
    cases = [
        (name, config) for number, name in enumerate(MODELS) for config in everything[number::6]
    ]
    check(cases, 2)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_model_stage_offload_and_precision_is_counted_to_the_byte(world_size, precision):
    configs = [config.replace(**PRECISIONS[precision]) for config in choices()]
    check([(name, config) for name in MODELS for config in configs], world_size)


@pytest.mark.slow
def test_precisions_optimizers_and_micro_batches_are_counted_to_the_byte():
    narrow = [config.replace(**PRECISIONS["bf16"]) for config in choices()[1::4]]
    narrower = [config.replace(**PRECISIONS["bf16, reduced so"]) for config in choices()[::4]]
    check([("gpt", c) for c in narrow] + [("lora", c) for c in narrower], 2, num_micro_batches=2)
    elementwise = ("sgd", "adagrad", "rmsprop")
    cases = [("conv", ZeroConfig(stage=1)), ("vit", ZeroConfig(stage=3))]
    check([(*case, optimizer) for case in cases for optimizer in elementwise], 1)


EIGHT_BIT = ("adamw8bit", "lion8bit", "sgd8bit")


@pytest.mark.parametrize(
    ("every", "optimizer"), [(8, "adamw8bit"), *slow_but([], [(4, name) for name in EIGHT_BIT])]
)
def test_states_with_numbers_for_blocks_are_counted_to_the_byte(every, optimizer):
    configs = [*choices()[1::every], ZeroConfig(stage=3, **PRECISIONS["bf16"])]
    check([("conv", config) for config in configs], 2, optimizer=optimizer)


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_per_parameter_of_mixed_precision_with_moments_of_8_bits(world_size):
    """Float32 main parameter and mean gradient 4 + 4, a moment 4 or 1 + 4 / 256, over N ranks.

    Norms, and tensors of at most 4,096 elements, add 1 %.
    """
    with torch.device("meta"):
        module = MODELS["gpt"].build(width=256)
    config = ZeroConfig(stage=3, **PRECISIONS["bf16"])
    of_one = 9 + 4 / 256
    cases = {"adamw": 16, "adamw8bit": 10 + 8 / 256, "lion8bit": of_one, "sgd8bit": of_one}
    for optimizer, expected in cases.items():
        optimizers = OPTIMIZERS[optimizer](module)
        plan = plan_of(config, module, optimizers, world_size, [])
        named = parameters_by_name(module)
        (tiers,) = expected_bytes(plan, named, optimizers, has_device_memory=True).by_rank
        numel = sum(parameter.numel() for parameter in named.values())
        nbytes = sum(tiers[Tier.DEVICE].values()) / numel
        assert nbytes == pytest.approx(expected / world_size, rel=0.015), optimizer


FULL_TENSOR_OPTIMIZERS = ("adafactor", "lamb", "rows", "muon and adamw")


def full_tensor_cases(configs):
    return [
        (name, config, optimizer)
        for optimizer in FULL_TENSOR_OPTIMIZERS
        for name in MODELS
        for config in configs
        if optimizer != "muon and adamw" or name in ("gpt", "llama", "tied")
    ]


@pytest.mark.slow
def test_ranks_that_own_full_tensors_are_counted_each_to_the_byte():
    """Every optimizer, stage and offload; the slow test below has all models."""
    check(full_tensor_cases(choices())[::19], 3)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_of_every_model_that_own_full_tensors_are_counted(world_size, precision):
    """Every fifth case, a different one for each precision and number of ranks."""
    configs = [config.replace(**PRECISIONS[precision]) for config in choices()]
    first = world_size // 2 + list(PRECISIONS).index(precision)
    check(full_tensor_cases(configs)[first::5], world_size)


def test_the_node_with_most_bytes_is_counted_where_ranks_differ():
    """A shard group has three ranks, a node two: nodes have ranks 0 and 1, 2 and 0, 1 and 2."""
    with torch.device("meta"):
        module = MODELS["gpt"].build()
    optimizers = OPTIMIZERS["lamb"](module)
    config = ZeroConfig(stage=2, sharding_group_size=3, offload_optimizer="cpu")
    step = partial(loss_of, batch=MODELS["gpt"].batch())
    runs = EngineRuns(module, optimizers, step, full_optimizers=[0])
    found = estimate(Choice("", "", config), runs, Machine(6, 2))
    sums = [sum(tiers[Tier.CPU].values()) for tiers in found.ranks.by_rank]
    assert len(set(sums)) == 3
    assert found.ranks.node_bytes(Tier.CPU, 2) == sum(sorted(sums)[1:])
    assert found.host_bytes >= sum(sorted(sums)[1:])


def test_states_of_an_optimizer_with_several_groups_are_those_of_each_group():
    module = torch.nn.Linear(3, 2, device="meta")
    groups = [{"params": [module.weight], "momentum": 0.9}, {"params": [module.bias]}]
    kept = OptimizerStates([torch.optim.SGD(groups, lr=0.1)])
    assert kept.of(module.weight, torch.float32).elementwise == {"momentum_buffer": 4}
    assert kept.of(module.bias, torch.float32).elementwise == {}


def _count_averaged(rank, world_size, cases):
    """The report with two averages, and the bytes that they add to it, by case."""
    Path("swap").mkdir(exist_ok=True)
    found = []
    for name, config in cases:
        trained = train(name, config)
        before = trained.engine.memory_report()
        shadows = [Shadow(trained.engine, MODELS[name].build()) for _ in range(2)]
        report = trained.engine.memory_report()
        tiers = {tier: dict(states) for tier, states in report.tiers.items()}
        added = report.total_bytes - before.total_bytes
        data_parallel = report.data_parallel_bytes - before.data_parallel_bytes
        found.append((tiers, report.average_bytes, added, data_parallel))
        for shadow in shadows:
            shadow.unwrap(torch.device("cpu"))
        assert trained.engine.memory_report().tiers == before.tiers
        trained.engine.close()
    return found


@pytest.mark.parametrize("every", [100, *slow_but([], [10, 4])])
def test_averages_count_as_optimizer_state_in_the_report_and_in_the_plan(every):
    everything = choices()
    cases = [("gpt", config) for config in everything[::every]]
    cases += [("lora", everything[8].replace(param_dtype="bf16")), ("conv", everything[-1])]
    for rank, counted in enumerate(run_ranks(2, _count_averaged, cases)):
        for (name, config), (tiers, nbytes, added, data_parallel) in zip(
            cases, counted, strict=True
        ):
            runs, _ = planned(name, config, averages=[Tier.DEVICE, Tier.CPU])
            counts = runs.count(config, RankOfGroup(rank, 2, False))
            assert by_name(counts.with_averages(counts.held)) == tiers, (name, config)
            assert sum(counts.averages.values()) == nbytes == added
            assert data_parallel == 2 * 4 * sum(p.numel() for p in runs.module.parameters())


def _count_files(rank, world_size, cases):
    """Bytes read from and written to files in the fourth step, by case."""
    Path("swap").mkdir(exist_ok=True)
    found = []
    for name, config in cases:
        totals = []
        for num_steps in (3, 4):
            trained = train(name, config, num_steps=num_steps)
            trained.engine.storage.pipeline.drain()  # waits for pending writes
            report = trained.engine.memory_report()
            totals.append((report.nvme_read_bytes, report.nvme_written_bytes))
            trained.engine.close()
        found.append(tuple(after - before for before, after in zip(*totals, strict=True)))
    return found


@pytest.mark.slow
def test_the_bytes_of_files_in_a_step_are_those_that_the_engine_reads_and_writes():
    nvme = [config for config in choices() if config.stage > 1 and "nvme" in repr(config)]
    nvme = [config for config in nvme if config.offload_optimizer.device == "nvme"]
    cases = [("gpt", nvme[0]), ("gpt", nvme[3].replace(param_dtype="bf16")), ("llama", nvme[4])]
    assert [config.offload_param is not None for _, config in cases] == [False, True, False]
    counted = run_ranks(2, _count_files, cases, timeout_s=120)[0]
    for (name, config), found in zip(cases, counted, strict=True):
        runs, _ = planned(name, config)
        counts = runs.count(config, RankOfGroup(0, 2, False))
        assert (counts.read, counts.written) == found, (name, config)


def test_unknown_optimizers_are_refused_with_a_list_of_known_ones():
    named = dict(torch.nn.Linear(2, 2).named_parameters())
    with pytest.raises(ValueError, match=r"one of .*adamw.*sgd.*got 'adamwww'"):
        make_optimizers("adamwww", named)
    with pytest.raises(ValueError, match="Muon steps the matrices of repeated blocks"):
        make_optimizers("muon", named)
