"""Operations on sharded `p.grad` and `p.data` act on the full tensor, or raise a clear error."""

from __future__ import annotations

import copy
import math
import operator
import pickle

import pytest
import torch
from torch import nn

from lightning_zero import Engine, OffloadConfig, ZeroConfig, full_grad, gathered
from lightning_zero.comm.communicator import Communicator
from lightning_zero.tensors.sharded import ShardedTensor
from tests.support.cells import SHARDED_STAGE
from tests.support.ranks import run_ranks

WORLD_SIZE = 3  # one rank has an empty shard of the second weight


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(9, 7), nn.Linear(7, 2, bias=False)])
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return (x * self.scale).square().sum()


def inputs(rank, step=0):
    return torch.linspace(-1, 1, 36).view(4, 9) * (1 + rank + step)


def build(stage, **options):
    torch.manual_seed(0)
    net = Net()
    reference = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, reference, optimizer, Engine(net, [optimizer], ZeroConfig(stage=stage, **options))


def backward(net, reference, engine, rank, world_size, step=0):
    """Computes the same gradients on both."""
    engine.backward(net(inputs(rank, step)))
    mean = sum(reference(inputs(other, step)) for other in range(world_size)) / world_size
    mean.backward()


def full(value):
    if isinstance(value, (list, tuple)):
        return [full(item) for item in value]
    return value.full_tensor() if isinstance(value, ShardedTensor) else value


def same(ours, expected):
    if isinstance(expected, (list, tuple)):
        return all(same(a, b) for a, b in zip(ours, expected, strict=True))
    if not isinstance(expected, torch.Tensor):
        return type(ours) is type(expected) and ours == pytest.approx(expected)
    has_same_type = ours.shape == expected.shape and ours.dtype == expected.dtype
    return has_same_type and torch.allclose(ours, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def mask(t):
    return (torch.arange(t.numel()).view(t.shape) % 3 == 1).float()


def rows(t):
    return torch.arange(len(t), dtype=t.dtype)[:, None] if t.dim() > 1 else torch.tensor(2.0)


METADATA = {
    "shape": lambda g, p: (g.shape, g.size(), g.numel(), g.nelement(), g.dim(), g.ndim),
    "stride": lambda g, p: (g.stride(), g.is_contiguous(), g.nbytes, g.element_size()),
    "len": lambda g, p: len(g) if g.dim() else 0,
    "root mean square": lambda g, p: g.norm() / g.numel() ** 0.5,
    "kind": lambda g, p: (g.is_floating_point(), g.is_sparse, g.dtype, g.device, g.layout),
}
REDUCTIONS = {
    "norm": lambda g, p: g.norm(),
    "norm of data": lambda g, p: g.data.norm(2),
    "norm of all dims": lambda g, p: torch.linalg.norm(g),
    "norm of order 1": lambda g, p: g.norm(p=1),
    "norm of order inf": lambda g, p: torch.linalg.vector_norm(g, math.inf),
    "flat norm": lambda g, p: g.flatten().norm(dim=0),
    "sum": lambda g, p: (g.sum(), torch.sum(g), g.view(-1).sum(0), g.double().sum()),
    "sum, kept": lambda g, p: g.sum(dim=tuple(range(g.dim())), keepdim=True),
    "mean": lambda g, p: g.mean(),
    "extremes": lambda g, p: (g.max(), g.min(), g.abs().amax(), torch.amin(g)),
    "counts": lambda g, p: ((g > 0).sum(), (g == 0).float().mean()),
    "any": lambda g, p: ((g > 0).any(), (g > -100).all(), torch.isfinite(g).all()),
    "format": lambda g, p: float(f"{g:.3f}") if g.dim() == 0 else 0,
    "item": lambda g, p: (g.norm().item(), g.mean().item(), bool((g != g).any())),
    "cosine": lambda g, p: (g * p).sum() / (g.norm() * (2 * g).norm()),
    "equal": lambda g, p: (torch.equal(g, g.clone()), torch.equal(g, g + 1)),
    "foreach": lambda g, p: torch._foreach_norm([g, 2 * g]),
}
ELEMENTWISE = {
    "operators": lambda g, p: [2 * g, g - 1, -g, g / 3, 1 / (g + 9), abs(g), g**2, 2**g, g // 2],
    "comparisons": lambda g, p: [g != 0, g > 0, g == g, ~(g < 0), (g > 0) & (g < 1)],
    "with the parameter": lambda g, p: [
        g * p,
        p * g,
        torch.addcmul(g, p, p),
        torch.add(g, p, alpha=0.1),
    ],
    "with its data": lambda g, p: [g * p.data, p.data + g.data, (p.data - 0.1 * g).square()],
    "with a mask": lambda g, p: [g * mask(g), mask(g) * g, torch.where(mask(g) > 0, g, 0.0)],
    "with rows": lambda g, p: [g * rows(g), rows(g) - g, g.masked_fill(rows(g) > 1, 7.0)],
    "functions": lambda g, p: [g.sign(), g.clamp(-0.1, 0.1), g.exp(), torch.maximum(g, 2 * g)],
    "torch.max of two": lambda g, p: torch.max(g, mask(g)),
    "dtypes": lambda g, p: [g.double(), g.bfloat16(), g.to(torch.float64), g.half().float()],
    "like": lambda g, p: [torch.zeros_like(g), torch.ones_like(g), torch.full_like(g, 2.0)],
    "copies": lambda g, p: [g.clone(), g.detach(), copy.deepcopy(g), g.contiguous()],
    "shapes": lambda g, p: [g.view(-1), g.flatten(), g.view(1, -1), g.reshape(1, -1)],
    "foreach": lambda g, p: torch._foreach_mul([g, g + 1], [p, mask(g)]),
    "foreach with a number": lambda g, p: torch._foreach_mul([g, g + 1], torch.tensor(2.0)),
    "filled": lambda g, p: [g.clone().fill_(g.mean()), torch.full_like(g, 3.0)],
    "a number with a dtype": lambda g, p: g * torch.tensor(2.0, dtype=torch.float64),
}


def _answer(rank, world_size, stage, options):
    net, reference, _, engine = build(stage, **options)
    backward(net, reference, engine, rank, world_size)
    wrong = []
    names = dict(net.named_parameters())
    for table in (METADATA, REDUCTIONS, ELEMENTWISE):
        for title, function in table.items():
            for name, q in reference.named_parameters():
                p = names[name]
                for part, ours, expected in (
                    ("grad", (p.grad, p), (q.grad, q)),
                    ("data", (p.data, p.data), (q.data, q.data)),
                ):
                    with torch.no_grad():
                        try:
                            if not same(full(function(*ours)), full(function(*expected))):
                                wrong.append((part, title, name))
                        except RuntimeError as error:
                            wrong.append((part, title, name, str(error)))
    engine.close()
    return wrong


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_operations_on_gradients_and_data_act_on_the_full_tensor(stage):
    assert run_ranks(WORLD_SIZE, _answer, stage, {}) == [[]] * WORLD_SIZE


def _answer_from_files(rank, world_size):
    files = OffloadConfig("nvme", nvme_path=".", max_in_cpu_bytes=0)
    return _answer(rank, world_size, 3, {"offload_param": files, "offload_optimizer": files})


@pytest.mark.slow
def test_operations_on_gradients_and_data_in_files_act_on_the_full_tensor():
    assert run_ranks(2, _answer_from_files) == [[]] * 2


def _mixed(rank, world_size, stage):
    """16-bit parameters: sharded data are the main parameters, in full precision."""
    net, reference, _, engine = build(stage, param_dtype=torch.bfloat16)
    engine.backward(net(inputs(rank).bfloat16()))
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        expected = full_grad(p)
        assert p.grad.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(p.grad.norm(), expected.norm())
        with torch.no_grad():
            product = full(p.grad * p)
        torch.testing.assert_close(product, expected * q, rtol=1e-2, atol=1e-3)
        if stage == 3:
            torch.testing.assert_close(p.data.norm(), q.data.norm())
    engine.close()


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_of_16_bit_parameters_equal_the_full_gradients(stage):
    run_ranks(2, _mixed, stage)


def _gather(rank, world_size, stage):
    net, reference, _, engine = build(stage)
    backward(net, reference, engine, rank, world_size)
    sent, all_gather = [], Communicator.all_gather

    def counted(comm, buffer, *args, **kwargs):
        sent.append(buffer.nbytes)
        return all_gather(comm, buffer, *args, **kwargs)

    Communicator.all_gather = counted
    engine.comm.sum_over_shards_ = engine.comm.max_ = None  # fails if it is called
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-6)
        assert torch.equal(full_grad(p), p.grad.full_tensor())
        extra = [num_bytes - q.nbytes for num_bytes in sent]
        assert all(0 <= num_bytes < 4 * world_size for num_bytes in extra), (q.shape, sent)
        sent.clear()
    engine.close()


@pytest.mark.parametrize("stage", SHARDED_STAGE)
def test_a_full_tensor_is_one_all_gather_of_its_own_elements(stage):
    run_ranks(WORLD_SIZE, _gather, stage)


# ---------------------------------------------------------------- refused operations

REFUSED = {
    "mean of rows": lambda t: t.mean(dim=1),
    "sum of columns": lambda t: t.sum(0),
    "largest of rows": lambda t: t.max(dim=1),
    "largest of flat": lambda t: t.flatten().max(dim=0),
    "transposed": lambda t: t.t(),
    "T": lambda t: t.T,
    "matmul": lambda t: t @ t.detach(),
    "item": lambda t: t[0, 0],
    "slice": lambda t: t[1:],
    "masked": lambda t: t[mask(t) > 0],
    "set": lambda t: operator.setitem(t, 0, 1.0),
    "iteration": list,
    "numpy": lambda t: t.numpy(),
    "tolist": lambda t: t.tolist(),
    "topk": lambda t: t.flatten().topk(2),
    "sort": lambda t: t.sort(),
    "median": lambda t: t.median(),
    "standard deviation": lambda t: t.std(),
    "all close": lambda t: torch.allclose(t, t + 1),
    "svd": torch.linalg.svd,
    "cat": lambda t: torch.cat([t, t]),
    "broadcast": lambda t: t * torch.ones(2, *t.shape),
    "too small": lambda t: t.add_(torch.ones(2, *t.shape)),
    "normal": lambda t: t.normal_(),
    "noise": torch.randn_like,
    "softmax": lambda t: t.softmax(-1),
    "pickle": pickle.dumps,
    "cumsum": lambda t: t.cumsum(0),
    "find": lambda t: t.nonzero(),
    "apply": lambda t: t.apply_(abs),
    "map": lambda t: t.map_(t, max),
}


REFUSED_OF_DATA = ("too small", "normal", "noise", "apply", "map")  # the others gather the values


def _refuse(rank, world_size, stage):
    net, reference, _, engine = build(stage)
    backward(net, reference, engine, rank, world_size)
    weight = net.layers[0].weight
    texts = {}
    for title, use in REFUSED.items():
        has_both = stage == 3 and title in REFUSED_OF_DATA
        tensors = [weight.grad, weight.data] if has_both else [weight.grad]
        for tensor, way in zip(tensors, ("full_grad", "gathered"), strict=False):
            try:
                use(tensor)
                texts[title, way] = "nothing was raised"
            except RuntimeError as error:
                texts[title, way] = str(error)
    engine.step()
    engine.close()
    return texts


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_an_unsupported_operation_names_parameter_and_remedy(stage):
    for texts in run_ranks(2, _refuse, stage):
        for (title, way), text in texts.items():
            assert way in text, (title, text)
            assert "layers.0.weight" in text, (title, text)


# ---------------------------------------------------------------- changed in place


@torch.no_grad()
def decay(p):
    p.grad.add_(p, alpha=0.1)


def decay_in_autograds_sight(p):
    p.grad.add_(p, alpha=0.1)
    p.grad.mul_(p)


def set_in_autograds_sight(p):
    p.grad = (p.grad * 0.5 + p * p.grad).detach()


def decay_data(p):
    p.grad.data.add_(p.data, alpha=0.1)


def mask_out(p):
    p.grad.mul_(mask(p.grad))


def mask_rows(p):
    p.grad.mul_(rows(p.grad))


def scale(p):
    p.grad = p.grad * 3


def scale_data(p):
    p.grad.data = p.grad.data * 3


def clip_each(p):
    p.grad.mul_(torch.clamp(0.1 / (p.grad.norm() + 1e-6), max=1.0))


def normalize(p):
    p.grad /= p.grad.norm() + 1e-6


def set_full(p):
    p.grad = mask(p)


def set_expanded(p):
    p.grad = torch.ones(()).expand(p.shape)


def set_sparse_mask(p):
    p.grad = torch.where(p.grad.abs() > 0.5 * p.grad.abs().max(), p.grad, 0.0)


def set_none(p):
    p.grad = None


def zero_one(p):
    p.grad.zero_()


def copy_in(p):
    p.grad.copy_(mask(p))


def fill_by_foreach(p):
    torch._foreach_mul_([p.grad], 0.5)
    torch._foreach_add_([p.grad], [p.data])


CHANGES = [
    decay,
    decay_in_autograds_sight,
    set_in_autograds_sight,
    decay_data,
    mask_out,
    mask_rows,
    scale,
    scale_data,
    clip_each,
    normalize,
    set_full,
    set_expanded,
    set_sparse_mask,
    set_none,
    zero_one,
    copy_in,
    fill_by_foreach,
]


def _change(rank, world_size, stage, options):
    """Whether two clipped steps equal those of one process, by change."""
    wrong = []
    for change in CHANGES:
        net, reference, optimizer, engine = build(stage, **options)
        expected = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            backward(net, reference, engine, rank, world_size, step)
            for parameter in net.parameters():
                change(parameter)
            for parameter in reference.parameters():
                change(parameter)
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.detach().clone()
            if change is not set_none:
                norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
                torch.testing.assert_close(engine.clip_grad_norm_(0.5), norm)
            optimizer.step()
            expected.step()
            is_dropped = step == 0 or change is decay_in_autograds_sight
            optimizer.zero_grad(set_to_none=is_dropped)
            expected.zero_grad(set_to_none=is_dropped)
        with gathered(net):
            pairs = zip(net.parameters(), reference.parameters(), strict=True)
            if not all(torch.allclose(a, b, atol=1e-6) for a, b in pairs):
                wrong.append(change.__name__)
        engine.close()
    return wrong


FILES = {"device": "nvme", "nvme_path": ".", "max_in_cpu_bytes": 0}
CASES = {
    "stage 0": (0, {}),
    "stage 1": (1, {}),
    "stage 2": (2, {}),
    "stage 3": (3, {}),
    "stage 3 in CPU memory": (3, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
    "stage 1 in files": (1, {"offload_optimizer": FILES}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
def test_gradients_changed_or_set_before_a_step_are_stepped_as_by_one_process(case):
    assert run_ranks(WORLD_SIZE, _change, *CASES[case]) == [[]] * WORLD_SIZE


def _set_wrong(rank, world_size, stage):
    net, reference, _, engine = build(stage)
    backward(net, reference, engine, rank, world_size)
    weight, before = net.layers[0].weight, full_grad(net.layers[0].weight)
    for wrong in (torch.ones(3), weight.grad.flatten()):
        with pytest.raises((ValueError, RuntimeError), match=r"layers\.0\.weight|of size"):
            weight.grad = wrong
    assert torch.equal(full_grad(weight), before)
    engine.step()
    engine.close()


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_gradient_of_another_shape_is_refused_where_it_is_set(stage):
    run_ranks(2, _set_wrong, stage)


def _set_without_backward(rank, world_size, stage):
    net, reference, optimizer, engine = build(stage)
    for parameter in (*net.parameters(), *reference.parameters()):
        parameter.grad = mask(parameter)
    optimizer.step()
    torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9).step()
    engine.close()
    pairs = zip(net.parameters(), reference.parameters(), strict=True)
    assert all(torch.allclose(a, b) for a, b in pairs)


@pytest.mark.default_cases("0", "3")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_set_without_a_backward_are_stepped(stage):
    run_ranks(2, _set_without_backward, stage)


def _differentiate(rank, world_size, stage):
    net, reference, _, engine = build(stage)
    backward(net, reference, engine, rank, world_size)
    weight = net.layers[0].weight
    penalty = (weight.grad * weight).sum()
    torch.testing.assert_close(
        penalty.detach(),
        (reference.layers[0].weight.grad * reference.layers[0].weight).sum().detach(),
    )
    with pytest.raises(
        RuntimeError, match=r"'sum' on p\.grad of parameter layers\.0\.weight.*no gr"
    ):
        penalty.backward()
    assert not weight.grad.detach().norm().requires_grad
    engine.zero_grad()
    backward(net, reference, engine, rank, world_size)
    assert not weight.grad.norm().requires_grad
    engine.close()


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_backward_through_a_sharded_gradient_is_an_error(stage):
    run_ranks(2, _differentiate, stage)


# ---------------------------------------------------------------- recipes by hand


class SAM:
    """Sharpness-aware minimization (Foret et al., 2021), written by hand."""

    def __init__(self, net, optimizer, rho=0.05):
        self.net, self.optimizer, self.rho = net, optimizer, rho

    @torch.no_grad()
    def climb(self):
        norms = [p.grad.norm(p=2) for p in self.net.parameters()]
        factor = self.rho / (torch.norm(torch.stack(norms), p=2) + 1e-12)
        self.steps = {}
        for p in self.net.parameters():
            self.steps[p] = p.grad * factor.to(p)
            p.add_(self.steps[p])
        self.optimizer.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p in self.net.parameters():
            p.sub_(self.steps[p])
        self.optimizer.step()
        self.optimizer.zero_grad()


class SAMOfData(SAM):
    """The same with copies of the data."""

    @torch.no_grad()
    def climb(self):
        norms = [p.grad.norm(p=2) for p in self.net.parameters()]
        factor = self.rho / (torch.stack(norms).norm() + 1e-12)
        self.old = {}
        for p in self.net.parameters():
            self.old[p] = p.data.clone()
            p.data.add_(p.grad * factor)
        self.optimizer.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p in self.net.parameters():
            p.data = self.old[p]
        self.optimizer.step()
        self.optimizer.zero_grad()


def _sam(rank, world_size, recipe, stage):
    net, reference, optimizer, engine = build(stage)
    ours = recipe(net, optimizer)
    theirs = recipe(reference, torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9))
    for step in range(3):
        backward(net, reference, engine, rank, world_size, step)
        ours.climb()
        theirs.climb()
        backward(net, reference, engine, rank, world_size, step)
        ours.descend()
        theirs.descend()
    engine.close()
    for a, b in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.default_cases("SAM-3", "SAMOfData-1")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("recipe", [SAM, SAMOfData])
def test_sharpness_aware_minimization_by_hand_equals_one_process(recipe, stage):
    run_ranks(WORLD_SIZE, _sam, recipe, stage)


class WithAverage(nn.Module):
    """A module with a frozen average of itself, which is sharded differently."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x):
        return self.net(x) + self.average(x)


def average_data(averages, parameters):
    for average, p in zip(averages, parameters, strict=True):
        average.data.mul_(0.9).add_(p.data, alpha=0.1)


@torch.no_grad()
def average_parameters(averages, parameters):
    for average, p in zip(averages, parameters, strict=True):
        average.data = 0.9 * average.data + (1 - 0.9) * p.data


@torch.no_grad()
def average_by_lerp(averages, parameters):
    for average, p in zip(averages, parameters, strict=True):
        average.data.lerp_(p.data, 0.1)


@torch.no_grad()
def average_by_foreach(averages, parameters):
    torch._foreach_lerp_([a.data for a in averages], [p.data for p in parameters], 0.1)


AVERAGED = [average_data, average_parameters, average_by_lerp, average_by_foreach]


def _average(rank, world_size, stage, of_what):
    """Averages after each step by hand, in every way."""
    torch.manual_seed(0)
    module = WithAverage()
    reference = copy.deepcopy(module)
    clones = [p.data.clone() for p in reference.net.parameters()]
    before_set_up = [p.data.clone() for p in module.net.parameters()]
    optimizer = torch.optim.SGD(module.net.parameters(), lr=0.1, momentum=0.9)
    engine = Engine(module, [optimizer], ZeroConfig(stage=stage))
    after_set_up = [p.data.clone() for p in module.net.parameters()]
    averages = {
        "deepcopy": list(module.average.parameters()),
        "clones": after_set_up,
        "full clones": before_set_up,
    }[of_what]
    expected = list(reference.average.parameters()) if of_what == "deepcopy" else clones
    theirs = torch.optim.SGD(reference.net.parameters(), lr=0.1, momentum=0.9)
    for step, average in enumerate(AVERAGED):
        if of_what != "deepcopy" and average is average_parameters:
            continue
        backward(module, reference, engine, rank, world_size, step)
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        theirs.zero_grad()
        average(averages, list(module.net.parameters()))
        average(expected, list(reference.net.parameters()))
    distances = [
        (a.data - p.data).norm() for a, p in zip(averages, module.net.parameters(), strict=True)
    ]
    if of_what == "deepcopy":
        with gathered(module):
            averages = [average.detach().clone() for average in averages]
    for a, b in zip(map(full, averages), expected, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-6)
    for ours, a, p in zip(distances, expected, reference.net.parameters(), strict=True):
        torch.testing.assert_close(ours, (a - p).norm().detach(), rtol=1e-4, atol=1e-6)
    engine.close()


@pytest.mark.default_cases("1-full clones", "3-deepcopy", "3-full clones")
@pytest.mark.parametrize("of_what", ["deepcopy", "clones", "full clones"])
@pytest.mark.parametrize("stage", [1, 3])
def test_an_average_by_hand_equals_one_process(stage, of_what):
    run_ranks(WORLD_SIZE, _average, stage, of_what)


def _data(rank, world_size, stage):
    """Weight normalization, absmax and magnitude pruning by `.data`, between steps."""
    net, reference, optimizer, engine = build(stage)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        backward(net, reference, engine, rank, world_size, step)
        for module, stepped in ((net, optimizer), (reference, expected)):
            stepped.step()
            stepped.zero_grad()
            for p in module.parameters():
                p.data.div_(p.data.norm())
                p.data.mul_(p.data.abs() > 0.1 * p.data.abs().max())
                p.data.copy_(torch.round(p.data / p.data.abs().max() * 127) / 127)
    engine.close()
    for a, b in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_data_changed_by_its_own_norms_equals_one_process(stage):
    run_ranks(WORLD_SIZE, _data, stage)


def _set_a_part(rank, world_size, stage):
    net, _, _, engine = build(stage)
    engine.backward(net(inputs(rank)))
    weight = net.layers[0].weight
    weight.data = weight.data - 0.1 * weight.grad
    with gathered(net):
        set_once = weight.detach().clone()
    weight.data = weight.data + (0.1 * weight.grad).full_tensor()
    weight.data.add_(weight.grad, alpha=-0.1)
    engine.zero_grad()
    engine.backward(net(inputs(rank)))
    engine.close()
    torch.testing.assert_close(weight.detach(), set_once)


@pytest.mark.parametrize("stage", [1, 2])
def test_data_computed_from_a_gradient_may_be_set_or_written(stage):
    run_ranks(2, _set_a_part, stage)
