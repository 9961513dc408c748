"""What all ranks do with parameters between the steps of stage 3: as by one process."""

from __future__ import annotations

import copy
import io
import pickle
import re
import time

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import Engine, OffloadConfig, ZeroConfig, gathered
from tests.support.fitting import make_trainer
from tests.support.ranks import run_ranks


class Net(nn.Module):
    """A model whose target is averaged by hand, and sharded at other offsets."""

    def __init__(self, *, is_frozen=True):
        super().__init__()
        self.online = nn.Sequential(
            nn.Linear(9, 7), nn.BatchNorm1d(7, affine=False), nn.Linear(7, 5, bias=False)
        )
        self.target = copy.deepcopy(self.online)
        self.scale = nn.Parameter(torch.tensor(1.5))
        for p in self.target.parameters():
            p.requires_grad_(not is_frozen)

    def forward(self, x):
        return ((self.online(x) - self.target(x)) * self.scale).square().mean()


def pairs(net):
    return list(zip(net.target.parameters(), net.online.parameters(), strict=True))


# ---------------------------------------------------------------- averages and other writes


@torch.no_grad()
def lerp(net, saved):
    for t, s in pairs(net):
        t.lerp_(s, 0.01)


@torch.no_grad()
def momentum(net, saved):
    for t, s in pairs(net):
        t.mul_(0.9).add_(s, alpha=0.1)


@torch.no_grad()
def detached(net, saved):
    for t, s in pairs(net):
        t.mul_(0.9).add_((1 - 0.9) * s.detach())


def data(net, saved):
    for t, s in pairs(net):
        t.data.mul_(0.9).add_(s.detach().data, alpha=0.1)


@torch.no_grad()
def foreach(net, saved):
    targets, sources = zip(*pairs(net), strict=True)
    torch._foreach_mul_(targets, 0.9)
    torch._foreach_add_(targets, sources, alpha=0.1)


@torch.no_grad()
def foreach_lerp(net, saved):
    torch._foreach_lerp_(list(net.target.parameters()), list(net.online.parameters()), 0.1)


@torch.no_grad()
def copied(net, saved):
    for t, s in pairs(net):
        t.copy_(0.9 * t + 0.1 * s)


def copied_data(net, saved):
    for t, s in pairs(net):
        t.data.copy_(s.data * 0.5)


@torch.no_grad()
def operators(net, saved):
    for t, s in pairs(net):
        t *= 0.9
        t += 0.1 * s
        t -= torch.sign(s) * 0.001


@torch.no_grad()
def with_out(net, saved):
    for t, s in pairs(net):
        torch.add(t, s, alpha=0.1, out=t)
        torch.clamp(t, -0.3, 0.3, out=t)


@torch.no_grad()
def from_full(net, saved):
    for t in net.target.parameters():
        t.add_(torch.linspace(-0.1, 0.1, t.numel()).view(t.shape))
        t.copy_(t * torch.full(t.shape, 0.9))


@torch.no_grad()
def to_full(net, saved):
    """An average outside of the module, full on every rank (timm's, torch_ema)."""
    for s in net.online.parameters():
        shadow = saved.setdefault(len(saved), torch.zeros(s.shape))
        shadow.sub_(0.1 * (shadow - s))
        shadow.lerp_(s, 0.1)


@torch.no_grad()
def swapped(net, saved):
    """torch_ema's `store`, `copy_to` and `restore`."""
    kept = [s.clone() for s in net.online.parameters()]
    for t, s in pairs(net):
        s.data.copy_(t.data)
    saved["norms"] = [s.norm() for s in net.online.parameters()]
    for s, values in zip(net.online.parameters(), kept, strict=True):
        s.copy_(values)


def by_state_dicts(net, saved):
    """timm's ModelEmaV2."""
    with torch.no_grad():
        entries = zip(
            net.target.state_dict().values(), net.online.state_dict().values(), strict=True
        )
        for t, s in entries:
            t.copy_(0.9 * t + 0.1 * s)


def by_load_state_dict(net, saved):
    net.target.load_state_dict(net.online.state_dict())


def loaded_from_before(net, saved):
    if "state" in saved:
        net.target.load_state_dict(saved["state"])
    saved["state"] = copy.deepcopy(net.online.state_dict())


def averaged_model(net, saved):
    if "swa" not in saved:
        saved["swa"] = torch.optim.swa_utils.AveragedModel(net.online)
    saved["swa"].update_parameters(net.online)


@torch.no_grad()
def rows_written(net, saved):
    weight = net.online[0].weight
    weight[0] = 0.25
    weight[1:3].mul_(0.5)
    weight.data[-1].zero_()
    weight.t()[2].add_(1.0)
    weight.index_fill_(0, torch.tensor([4]), 0.125)
    weight.masked_fill_(weight > 0.3, 0.3)


def constrained(net, saved):
    """Max-norm constraint on the rows, by hand."""
    weight = net.online[2].weight
    norms = weight.data.norm(2, dim=1, keepdim=True)
    weight.data.mul_(norms.clamp(max=0.5) / (norms + 1e-7))
    with torch.no_grad():
        weight.div_(weight.norm(dim=0))


@torch.no_grad()
def renormed(net, saved):
    net.online[0].weight.copy_(torch.renorm(net.online[0].weight, 2, 0, 0.4))
    net.online[2].weight.copy_(nn.functional.normalize(net.online[2].weight, dim=1))


def merged(net, saved):
    """peft: merged around a validation, and taken back."""
    weight = net.online[0].weight
    delta = torch.outer(torch.linspace(-1, 1, 7), torch.linspace(0, 1, 9))
    weight.data += delta
    saved["merged"] = weight.detach().sum()
    weight.data -= delta
    weight.data = weight.data + 0.5 * delta


@torch.no_grad()
def clipped(net, saved):
    for p in net.parameters():
        p.clamp_(-0.4, 0.4)
        nn.init.constant_(net.scale, 2.0)


def by_vectors(net, saved):
    """torch's own way of an average, say, over all parameters as one vector."""
    vector = nn.utils.parameters_to_vector(net.online.parameters())
    nn.utils.vector_to_parameters(0.5 * vector.detach(), net.target.parameters())


def moved(net, saved):
    net.to("cpu").float().cpu().requires_grad_(True).target.requires_grad_(False)


@torch.no_grad()
def orthogonal(net, saved):
    u, _, v = torch.linalg.svd(net.online[0].weight, full_matrices=False)
    net.online[0].weight.copy_(u @ v)


WRITES = [
    lerp, momentum, detached, data, foreach, foreach_lerp, copied, copied_data, operators, with_out,
    from_full, to_full, swapped, by_load_state_dict, loaded_from_before, averaged_model, merged,
    clipped, moved,
]  # fmt: skip
# Writes to more than elements: in stage 3 one error.
REFUSED_WRITES = [by_state_dicts, rows_written, constrained, renormed, orthogonal, by_vectors]


# ---------------------------------------------------------------- looks


def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@torch.no_grad()
def part_called(net):
    net.eval()
    result = net.online(torch.ones(2, 9))
    net.train()
    return result


LOOKS = {
    "norms": lambda n: [p.norm() for p in n.parameters()],
    "norms, detached": lambda n: [p.detach().norm(2) for p in n.parameters()],
    "statistics": lambda n: [(p.mean(), p.abs().max()) for p in n.online.parameters()],
    "items": lambda n: [p.sum().item() for p in n.parameters()],
    "distance": lambda n: [(t - s).norm().detach() for t, s in pairs(n)],
    "cosine": lambda n: [
        torch.cosine_similarity(t.flatten(), s.detach().flatten(), dim=0) for t, s in pairs(n)
    ],
    "comparisons": lambda n: [(p == 0).float().mean() for p in n.parameters()],
    "close": lambda n: [torch.isclose(t, s).all() for t, s in pairs(n)],
    "is nan": lambda n: any(torch.isnan(p).any() for p in n.parameters()),
    "stacked": lambda n: torch.stack([p.detach().norm() for p in n.parameters()]).norm(),
    "clones": lambda n: [p.detach().clone() for p in n.parameters()],
    "clones on the CPU": lambda n: {k: v.detach().cpu().clone() for k, v in n.named_parameters()},
    "state dict": lambda n: n.state_dict(),
    "state dict of a part": lambda n: n.online.state_dict(),
    "state dict of a layer": lambda n: n.online[2].state_dict(prefix="x."),
    "state dict, cloned": lambda n: {k: v.clone() for k, v in n.state_dict().items()},
    "state dict, halved": lambda n: {k: v.half() for k, v in n.state_dict().items()},
    "state dict, saved": lambda n: saved_and_loaded(n.state_dict()),
    "state dict, copied": lambda n: copy.deepcopy(n.state_dict()),
    "parameters, saved": lambda n: saved_and_loaded(list(n.parameters())),
    "parameters, pickled": lambda n: pickle.loads(pickle.dumps(list(n.online.parameters()))),
    "a parameter, copied": lambda n: copy.deepcopy(n.online[0].weight),
    "data, saved": lambda n: saved_and_loaded([p.data for p in n.parameters()]),
    "module, copied": lambda n: copy.deepcopy(n).state_dict(),
    "part, copied": lambda n: copy.deepcopy(n.online).state_dict(),
    "module, saved": lambda n: saved_and_loaded(n).state_dict(),
    "part, pickled": lambda n: pickle.loads(pickle.dumps(n.target)).state_dict(),
    "module, called": lambda n: copy.deepcopy(n).eval()(torch.ones(3, 9)).detach(),
    "part, called": part_called,
}
# Looks at more than elements, or at single ones: in stage 3 one error.
REFUSED_LOOKS = {
    "deviation": lambda n: [p.std() for p in n.online.parameters()],
    "all close": lambda n: [torch.allclose(t, s) for t, s in pairs(n)],
    "norms of rows": lambda n: [p.detach().norm(dim=-1) for p in n.online.parameters()],
    "norms of rows of data": lambda n: n.online[0].weight.data.norm(p=1, dim=1),
    "norms of rows in autograd's sight": lambda n: n.online[0].weight.norm(dim=1).detach(),
    "vectors": lambda n: nn.utils.parameters_to_vector(n.parameters()).detach(),
    "histogram": lambda n: [torch.histc(p.detach()) for p in n.online.parameters()],
    "histogram of data": lambda n: torch.histc(n.online[0].weight.data, bins=5),
    "quantiles": lambda n: torch.quantile(n.online[0].weight.detach(), torch.tensor([0.1, 0.9])),
    "median": lambda n: [p.detach().median() for p in n.parameters()],
    "top": lambda n: n.online[0].weight.detach().abs().flatten().topk(3),
    "sorted": lambda n: n.online[0].weight.detach().sort(dim=1),
    "arrays": lambda n: [p.detach().cpu().numpy() for p in n.parameters()],
    "arrays of data": lambda n: [p.data.numpy() for p in n.parameters()],
    "arrays by numpy": lambda n: [np.asarray(p.detach()) for p in n.parameters()],
    "lists": lambda n: [p.tolist() for p in n.parameters()],
    "lists of data": lambda n: [p.data.tolist() for p in n.parameters()],
    "elements": lambda n: n.online[0].weight[0, 0].item(),
    "rows": lambda n: [n.online[0].weight.detach()[1:3], n.online[0].weight.data[2]],
    "transposed": lambda n: n.online[0].weight.detach().t(),
    "svd": lambda n: torch.linalg.svdvals(n.online[0].weight.detach()),
    "product": lambda n: n.online[0].weight.detach() @ n.online[0].weight.detach().T,
    "concatenated": lambda n: torch.cat([p.detach().flatten() for p in n.parameters()]),
}


# ---------------------------------------------------------------- against one process


def build(config, **options):
    torch.manual_seed(0)
    net = Net(**options)
    reference = copy.deepcopy(net)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    theirs = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1)
    return net, reference, theirs, Engine(net, [optimizer], config)


def step(net, reference, theirs, engine, number):
    x = torch.linspace(-1, 1, 36).view(4, 9) * (1 + number)
    engine.backward(net(x))
    engine.step()
    engine.zero_grad()
    reference(x).backward()
    theirs.step()
    theirs.zero_grad()


def full_tensors(value):
    if isinstance(value, dict):
        return {key: full_tensors(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [full_tensors(item) for item in value]
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return np.array(value.detach()) if isinstance(value, torch.Tensor) else value


def difference(ours, expected):
    ours, expected = full_tensors(ours), full_tensors(expected)
    try:
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6, check_dtype=True)
    except (AssertionError, TypeError) as error:
        return str(error)
    return None


# The function, the parameter, and what to do.
REFUSAL = r"(ShardedTensorError: )?'\w+' on p\.data of parameter [\w.]+, which is .*gathered\("


def _look(rank, world_size, options):
    net, reference, theirs, engine = build(ZeroConfig(**options))
    wrong = {}
    step(net, reference, theirs, engine, 0)
    for title, look in (LOOKS | REFUSED_LOOKS).items():
        try:
            if options["stage"] == 3 and title in REFUSED_LOOKS:
                look(net)
                found = "nothing was raised"
            else:
                found = difference(look(net), look(reference))
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            if options["stage"] == 3 and title in REFUSED_LOOKS and re.match(REFUSAL, found):
                found = None
        if found is not None:
            wrong[title] = found
    step(net, reference, theirs, engine, 1)
    engine.close()
    return wrong


FILES = OffloadConfig("nvme", nvme_path=".", max_in_cpu_bytes=0)
CPU = {"offload_optimizer": "cpu", "offload_param": "cpu"}
CELLS = [
    (2, {"stage": 3}),
    *(
        pytest.param(size, options, marks=pytest.mark.slow)
        for size, options in [
            (1, {"stage": 3}),
            (3, {"stage": 3}),
            (2, {"stage": 1}),
            (2, {"stage": 2}),
            (2, {"stage": 3, **CPU}),
            (2, {"stage": 3, "offload_param": FILES, "offload_optimizer": FILES}),
            (4, {"stage": 3, "sharding_group_size": 2}),
        ]
    ),
]


@pytest.mark.parametrize(("world_size", "options"), CELLS)
def test_what_all_ranks_look_at_between_steps_is_what_one_process_sees(world_size, options):
    assert run_ranks(world_size, _look, options) == [{}] * world_size


def _write(rank, world_size, options):
    wrong = {}
    net, reference, theirs, engine = build(ZeroConfig(**options))
    for write in WRITES if options["stage"] == 3 else WRITES + REFUSED_WRITES:
        saved, expected, found = {}, {}, None
        try:
            for number in range(2):
                step(net, reference, theirs, engine, number)
                write(net, saved)
                write(reference, expected)
                with gathered(net):
                    ours = {name: value.clone() for name, value in net.state_dict().items()}
                found = found or difference(ours, reference.state_dict())
            for value, other in zip(saved.values(), expected.values(), strict=True):
                if isinstance(other, nn.Module):
                    value, other = value.state_dict(), other.state_dict()
                found = found or difference(value, other)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        if found is not None:
            wrong[write.__name__] = found
        with gathered(net, writeback=True), torch.no_grad():
            for p, q in zip(net.parameters(), reference.parameters(), strict=True):
                p.copy_(q)
    step(net, reference, theirs, engine, 3)
    engine.close()
    found = difference(dict(net.state_dict()), dict(reference.state_dict()))
    return wrong if found is None else {**wrong, "in the end": found}


@pytest.mark.parametrize(("world_size", "options"), CELLS)
def test_what_all_ranks_write_between_steps_is_what_one_process_writes(world_size, options):
    assert run_ranks(world_size, _write, options) == [{}] * world_size


def _refuse(rank, world_size):
    net, reference, theirs, engine = build(ZeroConfig(stage=3))
    before = copy.deepcopy(net.state_dict())
    for write in REFUSED_WRITES[1:]:
        with pytest.raises(RuntimeError, match=REFUSAL):
            write(net, {})
    step(net, reference, theirs, engine, 0)
    kept = net.state_dict()
    kept["online.0.bias"] = kept["online.0.bias"] + 1
    for write in (
        lambda: by_state_dicts(net, {}),
        lambda: net.state_dict()["online.0.weight"].t()[0].zero_(),
        lambda: kept["target.0.bias"].mul_(2),
    ):
        write()
        with pytest.raises(RuntimeError, match=r"entry of state_dict\(\) was changed.*gathered\("):
            net(torch.ones(4, 9))
    kept["target.0.weight"].zero_()
    with pytest.raises(
        RuntimeError, match=r"entry of state_dict\(\) was changed.*target\.0\.weight"
    ):
        engine.close()
    assert difference(dict(net.state_dict()), dict(reference.state_dict())) is None
    assert before.keys() == kept.keys()


def test_writes_to_more_than_elements_and_to_copies_are_errors_and_change_nothing():
    run_ranks(2, _refuse)


# ---------------------------------------------------------------- 16-bit parameters


def _mixed(rank, world_size):
    """A float32 module that computes in 16 bits has the values of the main parameters."""
    net, reference, theirs, engine = build(ZeroConfig(stage=3, param_dtype=torch.bfloat16))
    for write in (lerp, momentum, foreach, merged):
        write(net, {})
        write(reference, {})
    for title in ("norms", "state dict", "module, copied", "parameters, saved"):
        assert difference(LOOKS[title](net), LOOKS[title](reference)) is None, title
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(torch.ones(4, 9))
    engine.backward(loss)
    engine.step()
    engine.close()


def _narrow(rank, world_size):
    """A 16-bit module is copied as one, and its main parameters keep what they had beyond that."""
    torch.manual_seed(0)
    net = Net().bfloat16()
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.1)], ZeroConfig(stage=3))
    before = [p.data.clone() for p in net.parameters()]
    state = net.state_dict()
    assert {value.dtype for value in state.values() if value.is_floating_point()} == {
        torch.bfloat16
    }
    assert copy.deepcopy(net.online)[0].weight.dtype is torch.bfloat16
    net.load_state_dict(state)
    for p, old in zip(net.parameters(), before, strict=True):
        assert torch.equal(p.data, old)
    engine.close()


@pytest.mark.parametrize("program", [_mixed, pytest.param(_narrow, marks=pytest.mark.slow)])
def test_looks_and_writes_between_steps_have_the_dtype_of_the_module(program):
    run_ranks(2, program)


# ---------------------------------------------------------------- what ranks do differently

ALONE = {
    "norm": lambda n: n.online[0].weight.norm(),
    "state dict": lambda n: n.online[0].state_dict(),
    "copy": lambda n: copy.deepcopy(n.online[0]),
    "pickle": lambda n: pickle.dumps(n.online[0]),
    "write": lambda n: n.online[0].weight.data.mul_(2),
}


def _alone(rank, world_size, title):
    net, _, _, engine = build(ZeroConfig(stage=3))
    engine.backward(net(torch.ones(4, 9)))
    if rank == 0:
        start = time.monotonic()
    text = ""
    try:
        if rank == 0:
            ALONE[title](net)
        engine.step()
        for _ in range(2):
            engine.zero_grad()
            engine.backward(net(torch.ones(4, 9)))
            engine.step()
    except RuntimeError as error:
        text = str(error)
    assert rank or time.monotonic() - start < 10
    return text


@pytest.mark.parametrize(
    "title",
    [
        pytest.param(title, marks=() if title in ("state dict", "write") else pytest.mark.slow)
        for title in ALONE
    ],
)
def test_what_one_rank_does_alone_is_an_error_that_names_parameter_line_and_remedy(title):
    for text in run_ranks(2, _alone, title):
        assert "online.0" in text, text
        assert "test_between_steps.py:" in text, text
        assert re.search(r"rank 0 (reached|wrote to) [^;]*; not every rank did", text), text
        assert "lightning_zero.gathered(" in text, text


def _stale(rank, world_size):
    net, reference, theirs, engine = build(ZeroConfig(stage=3))
    state = {name: net.state_dict()[name] for name, _ in net.named_parameters()}
    before = copy.deepcopy(state)
    step(net, reference, theirs, engine, 0)
    assert difference(state, before) is None
    net.load_state_dict(state, strict=False)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    weight = net.online[0].weight
    with pytest.raises(RuntimeError, match=r"online\.0\.weight is sharded over 2 ranks"):
        weight.mul_(2)
    for convert in (net.half, net.double):
        with pytest.raises(ValueError, match=r"data set on parameter .* keeps its dtype"):
            convert()
    with pytest.raises(RuntimeError, match=r"no gradient flows through it.*forward_context"):
        weight.sum().backward()
    step(net, reference, theirs, engine, 1)
    engine.close()


def test_state_dicts_keep_their_values_and_gradients_outside_of_steps_are_refused():
    run_ranks(2, _stale)


def _too_large(rank, world_size):
    from lightning_zero.core import lockstep

    lockstep.available_memory_bytes = lambda: 300
    lockstep._MIN_CHECKED_BYTES = 100
    net, _, _, engine = build(ZeroConfig(stage=3))
    for look in (lambda: net.state_dict(), lambda: copy.deepcopy(net), lambda: pickle.dumps(net)):
        with pytest.raises(RuntimeError, match=r"needs \d+ bytes of CPU memory on every rank, and"):
            look()
    engine.backward(net(torch.ones(4, 9)))
    engine.close()


def test_full_values_that_do_not_fit_into_memory_are_refused_with_the_numbers():
    run_ranks(2, _too_large)


# ---------------------------------------------------------------- in the hooks of a Trainer


class Hooked(LightningModule):
    """Looks at itself and averages itself wherever Lightning calls it between steps."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.losses, self.seen = [], []

    def step(self, batch, index):
        return self.net(batch[0])

    def training_step(self, batch, index):
        loss = self.step(batch, index)
        self.losses.append(float(loss))
        return loss

    validation_step = step

    def data(self):
        return DataLoader(TensorDataset(torch.linspace(-1, 1, 144).view(16, 9)), batch_size=4)

    train_dataloader = val_dataloader = data

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def on_train_batch_end(self, *args):
        lerp(self.net, None)
        self.seen.append([float(p.norm()) for p in self.net.parameters()])
        self.log("norm", self.net.scale.norm())

    def on_before_optimizer_step(self, optimizer):
        self.seen.append([p.detach().mean().item() for p in self.net.online.parameters()])

    def on_validation_start(self):
        self.kept = copy.deepcopy(self.net.online.state_dict())

    def on_validation_epoch_end(self):
        momentum(self.net, None)
        self.seen.append(self.net.online[0].weight.detach().abs().max().item())

    def on_train_epoch_end(self):
        self.net.online.load_state_dict(self.kept)
        plain = copy.deepcopy(self.net).cpu().eval()
        self.seen.append(plain(torch.ones(2, 9)).item())


def _fit(rank, world_size, strategy):
    seed_everything(1, verbose=False)
    module = Hooked()
    options = {"limit_val_batches": 1.0, "max_epochs": 2, "num_sanity_val_steps": 1}
    trainer = make_trainer(strategy, **options)
    trainer.fit(module)
    state = {name: value.tolist() for name, value in module.state_dict().items()}
    return module.losses, module.seen, state


def test_what_hooks_of_a_module_do_between_steps_is_what_they_do_under_ddp():
    ours = run_ranks(2, _fit, {"stage": 3}, has_group=False)
    theirs = run_ranks(2, _fit, "ddp", has_group=False)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
