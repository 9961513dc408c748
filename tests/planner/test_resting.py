"""The bytes that the planner counts are those that an engine counts, on every rank."""

from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_zero import ZeroConfig
from lightning_zero.plan import make_plan
from lightning_zero.planner import Choice, Job, Machine, estimate, trace_step
from lightning_zero.planner.optimizers import KeptStates, make_optimizer
from lightning_zero.planner.resting import Inventory
from tests.distributed.ranks import run_ranks
from tests.planned import MODELS, choices, loss_of, train

OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
PRECISIONS = {
    "fp32": {},
    "bf16": {"param_dtype": "bf16"},
    "bf16, reduced so": {"param_dtype": "bf16", "reduce_dtype": "bf16"},
}


def planned(name, config, world_size, rank, make_optimizer, accumulates=False):
    """As a table: bytes by tier and state, and of the buffers."""
    with torch.device("meta"):
        module = MODELS[name].build()
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = make_optimizer(trained)
    plan = make_plan(module, config, world_size=world_size, optimizer_of=dict.fromkeys(trained, 0))
    inventory = Inventory(
        plan,
        module,
        [optimizer],
        offloads=config.offloads,
        is_apart=False,
        accumulates=accumulates,
    )
    resting = inventory.resting(rank)
    tiers = {tier.value: dict(states) for tier, states in resting.tiers.items()}
    return {"tiers": tiers, "buffers": resting.pool_bytes}


def _count(rank, world_size, cases, optimizer, num_micro_batches):
    """By case: what the engine counts after two steps."""
    Path("swap").mkdir(exist_ok=True)
    found = []
    for name, config in cases:
        trained = train(name, config, OPTIMIZERS[optimizer], num_micro_batches=num_micro_batches)
        report = trained.engine.memory_report()
        tiers = {tier: dict(states) for tier, states in report.tiers.items()}
        found.append({"tiers": tiers, "buffers": report.buffer_bytes})
        trained.engine.close()
    return found


def check(cases, world_size, optimizer="adamw", num_micro_batches=1):
    ranks = run_ranks(world_size, _count, cases, optimizer, num_micro_batches, timeout_s=280)
    # A fused optimizer refuses meta tensors; its states are those of the others.
    make = partial(torch.optim.AdamW) if optimizer == "adamw" else OPTIMIZERS[optimizer]
    for rank, counted in enumerate(ranks):
        for (name, config), count in zip(cases, counted, strict=True):
            expected = planned(name, config, world_size, rank, make, num_micro_batches > 1)
            assert expected == count, (name, rank, config)


def test_every_model_stage_and_offload_is_counted_to_the_byte():
    """Some for each model here, all of them in the slow test below."""
    everything = choices()
    cases = [
        (name, config) for number, name in enumerate(MODELS) for config in everything[number::6]
    ]
    check(cases, 2)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_model_stage_offload_and_precision_is_counted_to_the_byte(world_size, precision):
    configs = [config.replace(**PRECISIONS[precision]) for config in choices()]
    check([(name, config) for name in MODELS for config in configs], world_size)


def test_precisions_optimizers_and_micro_batches_are_counted_to_the_byte():
    narrow = [config.replace(**PRECISIONS["bf16"]) for config in choices()[1::4]]
    narrower = [config.replace(**PRECISIONS["bf16, reduced so"]) for config in choices()[::4]]
    check([("gpt", c) for c in narrow] + [("lora", c) for c in narrower], 2, num_micro_batches=2)
    for optimizer in ("sgd", "adagrad", "rmsprop"):
        check([("conv", ZeroConfig(stage=1)), ("vit", ZeroConfig(stage=3))], 1, optimizer)


def test_states_of_an_optimizer_with_several_groups_are_those_of_each_group():
    module = torch.nn.Linear(3, 2, device="meta")
    groups = [{"params": [module.weight], "momentum": 0.9}, {"params": [module.bias]}]
    kept = KeptStates([torch.optim.SGD(groups, lr=0.1)])
    assert kept.of(module.weight, torch.float32).elementwise == {"momentum_buffer": 4}
    assert kept.of(module.bias, torch.float32).elementwise == {}


def _count_files(rank, world_size, cases):
    """By case: bytes read from and written to files in the fourth step."""
    Path("swap").mkdir(exist_ok=True)
    found = []
    for name, config in cases:
        totals = []
        for num_steps in (3, 4):
            trained = train(name, config, OPTIMIZERS["adamw"], num_steps=num_steps)
            trained.engine.storage.pipeline.drain()  # else writes are still under way
            report = trained.engine.memory_report()
            totals.append((report.nvme_read_bytes, report.nvme_written_bytes))
            trained.engine.close()
        found.append(tuple(after - before for before, after in zip(*totals, strict=True)))
    return found


def test_the_bytes_of_files_in_a_step_are_those_that_the_engine_reads_and_writes():
    nvme = [config for config in choices() if config.stage > 1 and "nvme" in repr(config)]
    nvme = [config for config in nvme if config.offload_optimizer.device == "nvme"]
    cases = [("gpt", nvme[0]), ("gpt", nvme[3].replace(param_dtype="bf16")), ("llama", nvme[4])]
    assert [config.offload_param is not None for _, config in cases] == [False, True, False]
    counted = run_ranks(2, _count_files, cases, timeout_s=120)[0]
    for (name, config), found in zip(cases, counted, strict=True):
        with torch.device("meta"):
            module = MODELS[name].build()
        plan = make_plan(module, ZeroConfig(stage=3), world_size=2)
        step = partial(loss_of, batch=MODELS[name].batch())
        trace = trace_step(module, step, units=[unit.name for unit in plan.units])
        job = Job(module, [torch.optim.AdamW(module.parameters())], trace)
        traffic = estimate(Choice("", "", config), job, Machine(2, 2, is_apart=False)).traffic
        assert (traffic.nvme_read, traffic.nvme_written) == found, (name, config)


def test_unknown_optimizers_are_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"no optimizer 'adamwww'; torch has .*adamw.*sgd"):
        make_optimizer("adamwww", [])
