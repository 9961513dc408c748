"""Optimizers with moments of 8 bits give the same bits in every stage and tier, on any ranks."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_zero import Engine, OffloadConfig, ZeroConfig, load_checkpoint, save_checkpoint
from lightning_zero.optim import AdamW8bit, Lion8bit, SGD8bit
from lightning_zero.optim.chunks import chunks_of
from tests.support.fitting import make_trainer, settings
from tests.support.given_grads import SIZES, GivenGrads
from tests.support.warm import run_ranks

NUM_STEPS = 3
LARGE = [(1201, 501), *SIZES]  # several chunks in files
KEYS = {
    AdamW8bit: {"step", "exp_avg", "exp_avg_sq"},
    Lion8bit: {"exp_avg"},
    SGD8bit: {"momentum_buffer"},
}  # of a state in a full checkpoint
OTHERS = [Lion8bit, SGD8bit]


def _optimizer(module, kind=AdamW8bit, **options):
    return kind(module.parameters(), lr=0.01, weight_decay=0.1, **options)


def _steps(engine, module, optimizer, steps):
    for step in steps:
        if engine is None:
            module(step).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(module(step))
            engine.step()
            engine.zero_grad()


def expected(sizes=SIZES, num_steps=NUM_STEPS, kind=AdamW8bit):
    """Parameters and states after steps in one process without an engine, by number."""
    module = GivenGrads(sizes)
    optimizer = _optimizer(module, kind)
    _steps(None, module, optimizer, range(num_steps))
    return [p.detach() for p in module.parameters()], optimizer.state_dict()["state"]


def _config(options, folder="."):
    options = dict(options)
    for name in ("offload_optimizer", "offload_param"):
        if options.get(name) == "nvme":
            options[name] = OffloadConfig("nvme", nvme_path=folder, buffer_size=2**16)
    return ZeroConfig(**options)


def result(engine, module, optimizer):
    """Full parameters, and full states as they are kept."""
    optimizer.saves_codes = True
    packed = engine.optimizer_state(optimizer)
    optimizer.saves_codes = False
    full = engine.optimizer_state(optimizer)
    engine.close()
    return [p.detach().clone() for p in module.parameters()], packed, full


def _sizes_of(options):
    return LARGE if "nvme" in options.values() else SIZES


def _train(rank, world_size, cases, kind):
    found = []
    for options in cases:
        module = GivenGrads(_sizes_of(options))
        optimizer = _optimizer(module, kind)
        engine = Engine(module, [optimizer], _config(options))
        _steps(engine, module, optimizer, range(NUM_STEPS))
        if rank == 0 and options.get("offload_optimizer") == "nvme":
            assert len(chunks_of(engine.buckets[0], [0])) > 1
        found.append(result(engine, module, optimizer))
    return found


def assert_bits(found, values, states, kind=AdamW8bit):
    parameters, packed, full = found
    for one, other in zip(parameters, values, strict=True):
        assert torch.equal(one, other)
    assert packed["state"].keys() == states.keys()
    for number, state in states.items():
        own = packed["state"][number]
        assert own.keys() == state.keys()
        for key, value in state.items():
            assert (own[key].dtype, own[key].shape) == (value.dtype, value.shape), key
            assert torch.equal(own[key], value), key
        assert full["state"][number].keys() == KEYS[kind]
        moments = KEYS[kind] - {"step"}
        assert all(full["state"][number][key].shape == values[number].shape for key in moments)


CASES = [
    *({"stage": stage} for stage in range(4)),
    {"stage": 1, "reduce_bucket_size": 4000},
    {"stage": 3, "reduce_bucket_size": 9000, "overlap_step": True, "offload_optimizer": "cpu"},
    {"stage": 1, "offload_optimizer": "nvme"},
    {"stage": 3, "offload_optimizer": "nvme"},
    {"stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme"},
]


FEW = [CASES[1], CASES[5], CASES[8]]  # both stages and all tiers
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("world_size", "kind", "cases"),
    [
        (3, AdamW8bit, FEW),
        *((2, kind, FEW[:2]) for kind in OTHERS),
        *(slow(size, AdamW8bit, CASES) for size in (1, 2, 3, 4)),
        *(slow(size, kind, CASES) for size in (1, 2) for kind in OTHERS),
    ],
)
def test_weights_and_states_have_the_bits_of_one_process(world_size, kind, cases):
    of_cases = SIZES, *[LARGE for options in cases[-1:] if "nvme" in options.values()]
    references = {repr(sizes): expected(sizes, kind=kind) for sizes in of_cases}
    everywhere = run_ranks(world_size, _train, cases, kind, timeout_s=240)
    for number, options in enumerate(cases):
        values, states = references[repr(_sizes_of(options))]
        assert_bits(everywhere[0][number], values, states, kind)
        for of_rank in everywhere[1:]:
            for mine, other in zip(of_rank[number][0], values, strict=True):
                assert torch.equal(mine, other), options


def _save(rank, world_size, folder, kind=AdamW8bit):
    module = GivenGrads()
    optimizer = _optimizer(module, kind)
    engine = Engine(module, [optimizer], ZeroConfig(stage=3))
    _steps(engine, module, optimizer, range(NUM_STEPS))
    save_checkpoint(engine, f"{folder}/sharded", is_sharded=True)
    save_checkpoint(engine, f"{folder}/full.ckpt")
    optimizer.saves_codes = True
    save_checkpoint(engine, f"{folder}/codes.ckpt")
    engine.close()


def _resume(rank, world_size, folder, cases, kind=AdamW8bit):
    found = []
    for name, options in cases:
        module = GivenGrads()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        optimizer = _optimizer(module, kind)
        engine = Engine(module, [optimizer], _config(options))
        load_checkpoint(engine, f"{folder}/{name}")
        _steps(engine, module, optimizer, range(NUM_STEPS, NUM_STEPS + 2))
        found.append(result(engine, module, optimizer))
    return found


RESUMED = [
    *((name, {"stage": 1}) for name in ("sharded", "full.ckpt", "codes.ckpt")),
    *((name, {"stage": 3, "reduce_bucket_size": 9000}) for name in ("sharded", "full.ckpt")),
    *((name, {"stage": 3, "offload_optimizer": "nvme"}) for name in ("sharded", "full.ckpt")),
    ("sharded", {"stage": 0}),
]


FEW_RESUMED = [RESUMED[2], RESUMED[4], RESUMED[5]]  # each form, stage and tier


@pytest.mark.parametrize(
    "resumed", [FEW_RESUMED, pytest.param(RESUMED, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_what_two_ranks_saved_three_and_two_resume_with_the_same_bits(tmp_path, resumed):
    values, states = expected(num_steps=NUM_STEPS + 2)
    run_ranks(2, _save, str(tmp_path))
    for world_size, cases in ((3, resumed), (2, resumed[:1])):
        for found in run_ranks(world_size, _resume, str(tmp_path), cases, timeout_s=240)[0]:
            assert_bits(found, values, states)
    _assert_torch_resumes(torch.load(tmp_path / "full.ckpt"))
    _assert_torch_reads(tmp_path / "sharded", tmp_path / "joined.pt")


@pytest.mark.parametrize("kind", [SGD8bit, slow(Lion8bit)])
def test_what_two_ranks_saved_one_resumes_with_the_same_bits(kind, tmp_path):
    values, states = expected(num_steps=NUM_STEPS + 2, kind=kind)
    run_ranks(2, _save, str(tmp_path), kind)
    for found in run_ranks(1, _resume, str(tmp_path), RESUMED[:2], kind)[0]:
        assert_bits(found, values, states, kind)


def _assert_torch_resumes(saved):
    """AdamW of torch resumes the full checkpoint, and AdamW8bit without an engine its states."""
    module, alone = GivenGrads(), GivenGrads()
    for network, kind in ((module, torch.optim.AdamW), (alone, AdamW8bit)):
        network.load_state_dict(saved["state_dict"])
        optimizer = _optimizer(network, kind)
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer_states"][0]))
        _steps(None, network, optimizer, range(NUM_STEPS, NUM_STEPS + 2))
    values, _ = expected(num_steps=NUM_STEPS + 2)
    for own, other, value in zip(module.parts, alone.parts, values, strict=True):
        assert torch.equal(other, value)
        assert torch.allclose(own, value, atol=2e-3)


def _assert_torch_reads(folder, target):
    """DCP of torch joins the shards of codes and scales."""
    dcp_to_torch_save(folder, target)
    joined = torch.load(target, weights_only=False)["optimizer_0"]["state"]
    _, states = expected()
    for number, state in states.items():
        own = joined[f"parts.{number}"]
        assert own.keys() == state.keys()
        assert all(torch.equal(own[key], value) for key, value in state.items())


def _assign(rank, world_size):
    """What a user sees of the states between steps, and writes to them."""
    module = GivenGrads()
    optimizer = _optimizer(module)
    engine = Engine(module, [optimizer], ZeroConfig(stage=3))
    _steps(engine, module, optimizer, range(1))
    large = module.parts[0]
    seen = {
        key: value.full_tensor() for key, value in optimizer.state[large].items() if key != "step"
    }
    optimizer.state[large]["exp_avg_scales"].mul_(2)
    doubled = optimizer.state[large]["exp_avg_scales"].full_tensor()
    optimizer.state[large]["exp_avg_scales"] = seen["exp_avg_scales"]
    restored = optimizer.state[large]["exp_avg_scales"].full_tensor()
    engine.close()
    return seen, doubled, restored


def test_states_of_blocks_are_seen_and_written_between_steps_like_others():
    _, states = expected(num_steps=1)
    for seen, doubled, restored in run_ranks(2, _assign):
        for key, value in seen.items():
            assert torch.equal(value, states[0][key]), key
        assert torch.equal(doubled, 2 * states[0]["exp_avg_scales"])
        assert torch.equal(restored, states[0]["exp_avg_scales"])


def _adopt(rank, world_size, cases):
    """Parameters in float64 whose states an engine gets from the user, and leaves to another."""
    module = GivenGrads().double()
    optimizer = _optimizer(module)
    _steps(None, module, optimizer, range(1))
    for number, options in enumerate(cases):
        engine = Engine(module, [optimizer], _config(options))
        _steps(engine, module, optimizer, range(number + 1, number + 2))
        engine.close()
    alone = GivenGrads().double()
    own = _optimizer(alone)
    _steps(None, alone, own, range(len(cases) + 1))
    for value, expected in zip(module.parts, alone.parts, strict=True):
        assert torch.equal(value, expected)
        for key, state in own.state[expected].items():
            assert optimizer.state[value][key].dtype == state.dtype, key
            assert torch.equal(optimizer.state[value][key], state), key


def test_states_pass_from_one_engine_to_another_with_the_same_bits_in_float64():
    run_ranks(2, _adopt, [{"stage": 0}, CASES[-1], {"stage": 1}])


def _add_later(rank, world_size):
    """Errors for an optimizer whose parameters were another's, and for parameters of none."""
    module = GivenGrads()
    others = torch.optim.AdamW(module.parts[:2])
    optimizer = AdamW8bit(module.parts[2:4])
    engine = Engine(module, [others, optimizer], ZeroConfig(stage=3))
    optimizer.add_param_group({"params": [module.parts[4]]})  # was of none
    _steps(engine, module, optimizer, range(1))
    others.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [module.parts[1]]})
    with pytest.raises(ValueError, match=r"AdamW8bit.*built without it for parts\.1\..*Give this"):
        _steps(engine, module, optimizer, range(1))


def test_a_parameter_that_had_another_optimizer_is_an_error_and_one_of_none_is_not():
    run_ranks(2, _add_later)


def _save_and_resume(rank, world_size, folder):
    """Errors where one class resumes a sharded checkpoint of the other one."""
    maximizing = partial(torch.optim.AdamW, maximize=True)
    for saving, resuming, words in (
        (AdamW8bit, torch.optim.AdamW, r"does not fit AdamW; it has\n.*exp_avg_scales of parts"),
        (maximizing, AdamW8bit, "has only maximize=False, got True"),
    ):
        path = f"{folder}/{resuming.__name__}"
        for kind, is_saved in ((saving, True), (resuming, False)):
            module = GivenGrads()
            engine = Engine(module, [_optimizer(module, kind)], ZeroConfig(stage=3))
            if is_saved:
                _steps(engine, module, None, range(1))
                save_checkpoint(engine, path, is_sharded=True)
            else:
                with pytest.raises(ValueError, match=words):
                    load_checkpoint(engine, path)
            engine.close()


def test_a_sharded_checkpoint_of_the_other_class_is_an_error_where_its_values_would_be_wrong(
    tmp_path,
):
    run_ranks(2, _save_and_resume, str(tmp_path))


class Trained(LightningModule):
    """Two steps in an epoch, with the gradients of `GivenGrads`."""

    def __init__(self):
        super().__init__()
        self.net = GivenGrads()

    def training_step(self, batch, batch_idx):
        return self.net(self.global_step)

    def configure_optimizers(self):
        return _optimizer(self.net)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(range(2 * self.trainer.world_size))


def _fit(rank, world_size, form, stage, source, target, max_epochs):
    module = Trained()
    spec = settings(stage, checkpoint=form)
    trainer = make_trainer(spec, max_epochs=max_epochs, gradient_clip_val=1e6)
    module.on_train_end = partial(trainer.save_checkpoint, target)
    trainer.fit(module, ckpt_path=source)
    return [p.detach() for p in module.net.parts]


@pytest.mark.slow
def test_runs_of_the_trainer_resume_each_other_with_the_same_bits(tmp_path):
    source = None
    for epoch, (world_size, *how) in enumerate(((2, "sharded", 3), (3, "full", 1), (2, "full", 3))):
        target = str(tmp_path / f"{epoch}.ckpt")
        arguments = (*how, source, target, epoch + 1)
        trained = run_ranks(world_size, _fit, *arguments, has_group=False, timeout_s=120)
        source = target
        values, _ = expected(num_steps=2 * (epoch + 1))
        for own, value in zip(trained[0], values, strict=True):
            assert torch.equal(own, value), epoch
