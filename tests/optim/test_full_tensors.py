"""Optimizers that step full tensors step as without sharding, or are refused by name."""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import nn

from lightning_zero import Engine, ZeroConfig
from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.planner import EngineRuns
from lightning_zero.planner.choices import plan_of
from lightning_zero.planner.engine_run import RankOfGroup
from lightning_zero.planner.estimates import exchanged_bytes
from lightning_zero.record.spans import Kind
from tests.strategy.test_offload import ALL_NVME, compare
from tests.support import ranks
from tests.support.fitting import arrays, assert_same, fit, make_trainer, run_once, settings
from tests.support.full_tensors import ADAFACTOR, CASES, Lamb, MuonAndAdam, NormedLamb, Rows
from tests.support.warm import run_ranks

STAGES = [1, 2, 3]
ROUNDED = "Muon and AdamW"
BUCKETS = {"reduce_bucket_size": 2**13}  # several for the modules of these tests


def fit_all(rank, world_size, spec, cases):
    """Trains each case; returns the results by case."""
    outcomes = {}
    for name in cases:
        factory, options = CASES[name]
        factory = partial(factory, ranks=world_size, **_long(factory))
        outcomes[name] = fit(rank, world_size, spec, factory, options)
    return outcomes


def _long(factory):
    return {} if "num_batches" in getattr(factory, "keywords", {}) else {"num_batches": 5}


CELLS = [(3, 1), (2, 2), (3, 3)]
REST = [(1, 1), (2, 1), (1, 2), (3, 2), (1, 3), (2, 3)]


@pytest.mark.slow
@pytest.mark.shows("optimizers that step full tensors: Muon, Adafactor, LAMB")
@pytest.mark.parametrize(
    ("stage", "world_size"),
    [*CELLS, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in REST)],
)
def test_losses_and_parameters_equal_ddp(stage, world_size):
    spec = settings(stage, **BUCKETS)
    ours = run_ranks(world_size, fit_all, spec, list(CASES), has_group=False, timeout_s=120)
    expected = run_once(world_size, fit_all, "ddp", list(CASES))
    if world_size > 2:
        # Muon of torch rounds gradients to bfloat16: a difference in the last bit, from a sum of
        # three ranks in another order, becomes 2^-9 of the gradient. Stages 1 to 3 use one order.
        other = settings(1 if stage == 3 else 3, **BUCKETS)
        rounded = run_once(world_size, fit_all, other, [ROUNDED])
        expected = [{**theirs, **own} for theirs, own in zip(expected, rounded, strict=True)]
    for name in CASES:
        assert len(expected[0][name].losses) >= 5
        assert_same([r[name] for r in ours], [r[name] for r in expected])


# Every world size divides the global batch into equal parts, so that one process is a reference.
RESUMED = {
    name: partial(CASES[name][0], ranks=6, batch_size=1, num_batches=2)
    for name in ("Adafactor", "Muon and AdamW, clipped", "all in one call")
}
CHAINS = {
    "shortest": [(3, 2, "sharded"), (2, 1, "full")],
    "short": [(1, 2, "full"), (3, 3, "sharded"), (2, 1, "full")],
    "long": [(3, 1, "sharded"), (2, 3, "full"), (3, 2, "sharded"), (1, 3, "full"), (1, 2, "full")],
}


class SavingAtStart(Callback):
    """Saves a checkpoint when training starts and when it ends."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_start(self, trainer, pl_module):
        trainer.save_checkpoint(f"{self.folder}/loaded")

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(f"{self.folder}/trained")


def _train_on(rank, world_size, spec, sources, folder, max_epochs):
    """Resumes each case from its source; returns the final parameters by case."""
    states = {}
    for name, source in sources.items():
        seed_everything(7 if source is None else 50, verbose=False)
        module = RESUMED[name]()
        callbacks = [SavingAtStart(f"{folder}/{name}")] if folder else []
        trainer = make_trainer(spec, max_epochs=max_epochs, callbacks=callbacks)
        trainer.fit(module, ckpt_path=source)
        if folder:
            trainer.save_checkpoint(f"{folder}/{name}/late")
        states[name] = arrays(module.state_dict())
    return states


def opened(path, name):
    """Parameters, and states of each optimizer by parameter name."""
    module = RESUMED[name]()
    built = module.configure_optimizers()
    names = {p: key for key, p in module.named_parameters()}
    checkpoint = open_checkpoint(path)
    states = []
    for optimizer, state in zip(
        built if isinstance(built, list) else [built], checkpoint["optimizer_states"], strict=True
    ):
        ordered = [names[p] for group in optimizer.param_groups for p in group["params"]]
        states.append({ordered[k] if k in range(99) else k: v for k, v in state["state"].items()})
    return checkpoint["state_dict"], states


def assert_equal_bits(one, other):
    if isinstance(other, dict):
        assert set(one) == set(other)
        for key, value in other.items():
            assert_equal_bits(one[key], value)
    elif isinstance(other, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal_bits(a, b)
    elif isinstance(other, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.clone(), other.clone())
    else:
        assert one == other


@pytest.mark.default_cases("shortest")
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_run_resumes_from_full_and_sharded_checkpoints_in_any_stage_and_world_size(
    tmp_path, chain
):
    sources = dict.fromkeys(RESUMED)
    for epoch, (stage, world_size, form) in enumerate(chain):
        folder = tmp_path / str(epoch)
        spec = settings(stage, checkpoint=form, **BUCKETS)
        results = run_ranks(
            world_size, _train_on, spec, sources, str(folder), epoch + 1, has_group=False
        )
        for name, source in sources.items():
            if source is not None:
                assert_equal_bits(opened(folder / name / "loaded", name), opened(source, name))
            trained = opened(folder / name / "trained", name)
            assert_equal_bits(opened(folder / name / "late", name), trained)
            sources[name] = str(folder / name / "trained")
    (expected,) = run_once(1, _train_on, "auto", dict.fromkeys(RESUMED), None, len(chain))
    for result in results:
        for name, state in expected.items():
            for key, value in state.items():
                np.testing.assert_allclose(
                    result[name][key], value, rtol=2e-6, atol=2e-6, err_msg=f"{name} {key}"
                )


def _states_and_unsharded(rank, world_size, stage):
    """States in the full checkpoint, after `close`, and of the optimizer of one process."""
    factory, _ = CASES["Adafactor"]
    torch.manual_seed(0)
    module, alone = factory().gpt, factory().gpt
    alone.load_state_dict(module.state_dict())
    optimizer, expected = ADAFACTOR(module.parameters()), ADAFACTOR(alone.parameters())
    engine = Engine(module, [optimizer], ZeroConfig(stage=stage, **BUCKETS))
    ids = torch.arange(8).repeat(2, 1)
    for number in range(3):
        for model in (module, alone):
            loss = model(ids + number).square().mean()
            engine.backward(loss) if model is module else loss.backward()
        engine.step()
        expected.step()
        engine.zero_grad()
        expected.zero_grad()
    report = engine.memory_report()
    states = sum(v.numel() * v.element_size() for s in expected.state.values() for v in s.values())
    parameters = 8 * sum(p.numel() for p in alone.parameters())
    # The states of other ranks are estimated from those of this rank, which may own no vector.
    assert report.data_parallel_bytes == pytest.approx(parameters + states, rel=0.02)
    owned = len(optimizer.state)
    engine.close()
    for mine, theirs in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
        entry = optimizer.state[mine]
        assert set(entry) == set(expected.state[theirs])
        for key, value in expected.state[theirs].items():
            torch.testing.assert_close(entry[key], value, rtol=1e-4, atol=1e-7)
    return owned, report.total_bytes / report.data_parallel_bytes


@pytest.mark.default_cases("2")
@pytest.mark.parametrize("stage", [2, 3])
def test_states_are_on_one_rank_each_until_the_engine_is_closed(stage):
    results = run_ranks(3, _states_and_unsharded, stage)
    factory, _ = CASES["Adafactor"]
    assert sum(owned for owned, _ in results) == len(list(factory().parameters()))
    for _, ratio in results:
        assert ratio < {2: 0.75, 3: 0.45}[stage]


OFFLOADED = {
    2: [{"offload_optimizer": "cpu", "overlap_step": True}],
    3: [{"offload_optimizer": "cpu", "offload_param": "cpu"}, {**ALL_NVME, "overlap_step": True}],
}


def _compare_offloaded(rank, world_size):
    # With states in CPU memory, one call for all tensors executes the same code as several calls.
    for name, same in (("Adafactor", OFFLOADED), ("all in one call", {3: OFFLOADED[3][1:]})):
        factory, options = CASES[name]
        factory = partial(factory, ranks=2, num_batches=4)
        compare(rank, world_size, factory, lambda options=options: options, tuple(same), same)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_offloaded_and_overlapped_steps_give_the_same_bits():
    ranks.run_ranks(2, _compare_offloaded, has_group=False, timeout_s=120)


def _fit_each_precision(rank, world_size, spec):
    factory, options = CASES["Muon and Adam in one"]
    outcomes = {}
    for precision in ("bf16-mixed", "bf16-true"):
        module = partial(factory, ranks=world_size, num_batches=5)
        outcomes[precision] = fit(rank, world_size, spec, module, {"precision": precision})
    return outcomes


@pytest.mark.slow
def test_main_parameters_are_stepped_as_full_tensors_under_lower_precisions():
    sharded = run_ranks(2, _fit_each_precision, settings(3, **BUCKETS), has_group=False)
    replicated = run_once(2, _fit_each_precision, settings(0, **BUCKETS))
    for ours, expected in zip(sharded, replicated, strict=True):
        for precision, outcome in expected.items():
            assert len(set(outcome.losses)) > 1
            np.testing.assert_allclose(ours[precision].losses, outcome.losses, rtol=1e-2)


def _refuse(rank, world_size, stage):
    config = ZeroConfig(stage=stage)

    def attach(build, message, module=None):
        module = module or nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
        with pytest.raises(ValueError, match=message):
            Engine(module, [build(module.parameters())], config)

    attach(torch.optim.LBFGS, "LBFGS cannot be stepped .* whose step.. needs no closure")
    attach(NormedLamb, "NormedLamb cannot be sharded: the update of each parameter depends on")
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    first, second = module[0].parameters(), module[1].parameters()
    engine = Engine(module, [torch.optim.AdamW(first)], config)
    with pytest.raises(ValueError, match=r"Lamb must step full tensors, but 1.weight was sharded"):
        engine.attach(Lamb(second))
    engine.close()


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_optimizers_that_cannot_be_sharded_are_refused_by_name(stage):
    run_ranks(2, _refuse, stage)


def _thaw(rank, world_size):
    """Gives a layer that no optimizer had at first to an optimizer later."""
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    optimizers = [
        MuonAndAdam([{"params": [module[1].weight], "use_muon": True}]) for module in modules
    ]
    for module in modules:
        module[0].requires_grad_(False)
    engine = Engine(modules[0], optimizers[:1], ZeroConfig(stage=3))
    for number in range(4):
        if number == 2:
            for module, optimizer in zip(modules, optimizers, strict=True):
                module[0].requires_grad_(True)
                group = {"params": list(module[0].parameters()), "use_muon": False}
                optimizer.add_param_group(group)
        for module in modules:
            loss = module(torch.ones(2, 4) * number).square().sum()
            engine.backward(loss) if module is modules[0] else loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    engine.close()
    for one, other in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_parameters_unfrozen_later_are_stepped_as_full_tensors_too():
    run_ranks(2, _thaw)


def _of_muon():
    shapes = [(24, 40), (40, 24), (24, 72), (72, 24), (24, 24)]
    return nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes))


def _loss(module):
    return module(torch.ones(2, 24)).square().mean()


def _bytes_of_a_step(rank, world_size, stage, num_micro_batches):
    """Bytes of slices, and of all-to-alls and of all other sends in a step of Muon."""
    torch.manual_seed(0)
    module = _of_muon()
    optimizer = torch.optim.Muon(module.parameters())
    engine = Engine(module, [optimizer], ZeroConfig(stage=stage, **BUCKETS))
    for number in range(3):
        if number == 2:
            engine.recorder.begin(number)
        for _ in range(num_micro_batches):
            engine.backward(_loss(module))
        engine.step()
    recording = engine.recorder.end()
    slices = [
        [slot.numel - len(bucket.layout.owned(slot, slot.owner)) for slot in bucket.layout.slots]
        for bucket in engine.plan.buckets
    ]
    kinds = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
    sent = sum(s.nbytes for kind in kinds for s in recording.of(kind) if s.start_s >= 0)
    engine.close()
    return recording.nbytes(Kind.ALL_TO_ALL), sum(map(sum, slices)), sent


@pytest.mark.parametrize(
    ("stage", "num_micro_batches"), [pytest.param(2, 1, marks=pytest.mark.slow), (3, 2)]
)
def test_a_step_sends_slices_of_parameters_and_gradients_to_the_owners_once(
    stage, num_micro_batches
):
    results = run_ranks(3, _bytes_of_a_step, stage, num_micro_batches)
    exchanged = sum(nbytes for nbytes, *_ in results)
    (slices,) = {slices for _, slices, _ in results}
    # To the owner go parameter and gradient, and the parameter comes back, in float32. Padding of
    # less than 32 elements per tensor counts as part of it.
    assert 3 * 4 * slices <= exchanged < 3 * 4 * (slices + 5 * 32)
    with torch.device("meta"):
        module = _of_muon()
    optimizers, config = [torch.optim.Muon(module.parameters())], ZeroConfig(stage, **BUCKETS)
    settings = {"num_micro_batches": num_micro_batches, "full_optimizers": [0]}
    runs = EngineRuns(module, optimizers, _loss, **settings)
    plan = plan_of(config, module, optimizers, 3, [0])
    for rank, (nbytes, _, sent) in enumerate(results):
        assert sent == runs.count(config, RankOfGroup(rank, 3, False)).sent
        assert nbytes == exchanged_bytes(plan, rank)


class Failing(Lamb):
    """Lamb whose step fails once."""

    fails_next = False

    def begin(self, parameters):
        """See the class."""
        fails, self.fails_next = self.fails_next, False
        if fails:
            raise ValueError("out of luck")


def _tensors():
    torch.manual_seed(0)
    sizes = [(6, 20), (20, 30), (30, 10), (10, 2)]
    return nn.Sequential(*(nn.Linear(*size) for size in sizes))


def _fail_on_one_rank(rank, world_size, stage):
    module = _tensors()
    optimizer = Failing(module.parameters())
    engine = Engine(module, [optimizer], ZeroConfig(stage=stage, reduce_bucket_size=500))
    found = []
    for number in range(3):
        optimizer.fails_next = rank == 1 == number
        try:
            engine.backward(module(torch.ones(2, 6)).square().mean())
            engine.step()
        except Exception as error:
            found.append((number, type(error).__name__))
            if number == 2:
                return found
    return found


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_no_rank_waits_for_one_whose_step_of_full_tensors_has_failed(stage):
    results = run_ranks(2, _fail_on_one_rank, stage, timeout_s=30)
    failed = [(1, "PeerFailedError"), (2, "PeerFailedError")]
    assert results == [failed, [(1, "ValueError"), failed[1]]]


def _two_kinds(rank, world_size, stage):
    """Final parameters: of Lamb, on the worker, and of another optimizer in one call; and of both
    on one process."""
    outcomes = []
    for is_alone in (False, True):
        module = _tensors()
        lambs, others = list(module[:2].parameters()), list(module[2:].parameters())
        optimizers = [Lamb(lambs), Rows(others)]
        if not is_alone:
            config = ZeroConfig(stage=stage, overlap_step=True, reduce_bucket_size=500)
            engine = Engine(module, optimizers, config)
        for number in range(6):
            loss = module(torch.full((2, 6), 1.0 + number)).square().mean()
            loss.backward() if is_alone else engine.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if not is_alone:
            engine.close()
        outcomes.append([parameter.detach() for parameter in module.parameters()])
    return outcomes


def test_a_step_in_one_call_waits_for_the_worker_of_another_optimizer():
    for ours, alone in run_ranks(2, _two_kinds, 2, timeout_s=60):
        assert all(map(torch.equal, ours, alone))


def _on_one_shard(rank, world_size):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = _tensors()
        config = ZeroConfig(stage=3, overlap_step=True)
        engine = Engine(module, [Lamb(module.parameters())], config)
        engine.backward(module(torch.ones(2, 6)).square().mean())
        engine.step()
        engine.close()
    return [str(one.message) for one in caught if "overlap_step" in str(one.message)]


def test_one_shard_keeps_its_overlap():
    assert run_ranks(1, _on_one_shard) == [[]]
