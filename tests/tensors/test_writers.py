"""Functions that may write to a parameter between steps: as by DDP, or one error with the way out.

Each function is called on one tensor of a trained module and, beside it, on the same values in
plain tensors. Collectives among these functions are really run, so ranks must stay in step.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.overrides import handle_torch_function, has_torch_function_unary

from lightning_zero import Engine, ZeroConfig, gathered
from tests.support.fitting import assert_same, fit_ranks, fit_reference, settings
from tests.support.models import Recorder
from tests.support.ranks import run_ranks

SIZE = 4  # the weight is a square, so that it can be transposed in place


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, SIZE * SIZE).view(SIZE, SIZE))
        self.bias = nn.Parameter(torch.ones(SIZE))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias).square().mean()


# ---------------------------------------------------------------- torch.distributed


def other():
    return 1 - dist.get_rank()


def like(t):
    return torch.full((SIZE, SIZE), dist.get_rank() + 1.0)


def halves(t):
    return list(t.chunk(2))


def send_and_receive(receive):
    """Each rank sends plain values to the other one, which receives them into the tensor."""

    def exchange(t):
        sent = dist.isend(like(t), other())
        try:
            receive(t)
        except RuntimeError:
            dist.recv(like(t), other())  # the other rank has sent
            raise
        finally:
            sent.wait()

    return exchange


def batched(t):
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, t, other())]):
        work.wait()


def sent(t):
    received = like(t)
    work = dist.irecv(received, other())
    try:
        dist.send(t, other())
    except RuntimeError:
        dist.send(like(t), other())  # for which the other rank waits
        raise
    finally:
        work.wait()
    return received


def gather_out(t):
    outputs = [like(t) for _ in range(2)]
    dist.all_gather(outputs, t)
    return torch.stack(outputs)


def gather_into(call):
    def into(t):
        output = torch.empty(2 * SIZE, SIZE)
        call(output, t)
        return output

    return into


def scatter_from(call):
    def scatter(t):
        output = torch.empty(SIZE // 2, SIZE)
        call(output, t)
        return output

    return scatter


def gather_to_zero(t):
    outputs = [like(t) for _ in range(2)] if dist.get_rank() == 0 else None
    dist.gather(t, outputs)
    return outputs


def all_to_all_out_of(t):
    outputs = [like(t), like(t)]
    dist.all_to_all(outputs, [t, t])
    return outputs


def all_to_all_single_out_of(t):
    output = like(t)
    dist.all_to_all_single(output, t)
    return output


def coalesced(t):
    with dist._coalescing_manager():
        dist.all_reduce(t)


def waited(call):
    return lambda t: call(t).wait()


COLLECTIVES = {
    "all_reduce": dist.all_reduce,
    "all_reduce, asynchronous": waited(lambda t: dist.all_reduce(t, async_op=True)),
    "all_reduce, largest": lambda t: dist.all_reduce(t, op=dist.ReduceOp.MAX),
    "all_reduce of a row": lambda t: dist.all_reduce(t[1]),
    "all_reduce, flat": lambda t: dist.all_reduce(t.view(-1)),
    "all_reduce_coalesced": lambda t: dist.all_reduce_coalesced([t, like(t)]),
    "average": lambda t: (dist.all_reduce(t), t.div_(2)),
    "broadcast": lambda t: dist.broadcast(t, 0),
    "broadcast, asynchronous": waited(lambda t: dist.broadcast(t, 1, async_op=True)),
    "reduce": lambda t: dist.reduce(t, 0),
    "recv": send_and_receive(lambda t: dist.recv(t, other())),
    "irecv": send_and_receive(lambda t: dist.irecv(t, other()).wait()),
    "batch_isend_irecv": send_and_receive(batched),
    "send": sent,
    "all_gather": gather_out,
    "all_gather_into_tensor": gather_into(dist.all_gather_into_tensor),
    "all_gather_into_tensor, into": lambda t: dist.all_gather_into_tensor(t, like(t)[:2].clone()),
    "all_gather_object": lambda t: dist.all_gather_object([None, None], t.shape),
    "gather": gather_to_zero,
    "scatter": lambda t: dist.scatter(t, [like(t), like(t)] if dist.get_rank() == 0 else None),
    "reduce_scatter": lambda t: dist.reduce_scatter(t, [like(t), like(t)]),
    "reduce_scatter_tensor": lambda t: dist.reduce_scatter_tensor(t, torch.ones(2 * SIZE, SIZE)),
    "reduce_scatter_tensor, out of": scatter_from(dist.reduce_scatter_tensor),
    "all_to_all": lambda t: dist.all_to_all([t, like(t)], [like(t), like(t)]),
    "all_to_all, out of": all_to_all_out_of,
    "all_to_all_single": lambda t: dist.all_to_all_single(t, like(t)),
    "all_to_all_single, out of": all_to_all_single_out_of,
    "coalesced": coalesced,
    "functional": lambda t: dist._functional_collectives.all_reduce(t, "sum", dist.group.WORLD) + 0,
    "functional, in place": lambda t: torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce_(t, "sum", dist.group.WORLD.group_name)
    ),
}

# Torch looks for no subclasses in lists of lists, nor in lists beside a tensor. Called by one rank.
LISTS = {
    "all_gather": lambda t: dist.all_gather([t], like(t)),
    "all_gather_coalesced": lambda t: dist.all_gather_coalesced([[t]], [like(t)]),
    "gather": lambda t: dist.gather(like(t), [t]),
    "scatter": lambda t: dist.scatter(like(t), [t]),
    "reduce_scatter": lambda t: dist.reduce_scatter(like(t), [t]),
    "all_to_all": lambda t: dist.all_to_all([like(t)], [t]),
}


# ---------------------------------------------------------------- operators of others

LIBRARY = torch.library.Library("zero_writers", "DEF")


def define(schema, run):
    name = schema.split("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    return getattr(torch.ops.zero_writers, name)


def by_memory(t, factor):
    """Writes as a kernel does, of which version counters do not know."""
    t.numpy()[...] *= factor


def fill_by_memory(t, value):
    t.numpy()[...] = value


@torch.library.custom_op("zero_writers::scale_inplace", mutates_args=("x",))
def scale_inplace(x: Tensor, factor: float) -> None:
    x.mul_(factor)


@torch.library.custom_op("zero_writers::scale_by_memory", mutates_args=("x",))
def scale_by_memory(x: Tensor) -> None:
    by_memory(x, 3.0)


@torch.library.custom_op("zero_writers::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


@torch.library.custom_op("zero_writers::mixed", mutates_args=("x",))
def mixed(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return y * 2


@torch.library.custom_op("zero_writers::many", mutates_args=("xs",))
def many(xs: list[Tensor], y: Tensor) -> None:
    for x in xs:
        x.copy_(y)


@torch.library.custom_op("zero_writers::statistics", mutates_args=())
def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(0), x.std(0)


@torch.library.custom_op("zero_writers::unknown", mutates_args="unknown")
def unknown(x: Tensor) -> None:
    x.neg_()


raw = define("raw(Tensor(a!) x) -> ()", lambda x: by_memory(x, 2.0))
raw_returned = define(
    "raw_returned(Tensor(a!) x) -> Tensor(a!)", lambda x: (by_memory(x, 2.0), x)[1]
)
raw_out = define(
    "raw_out(Tensor x, *, Tensor(a!) out) -> ()", lambda x, out: fill_by_memory(out, 7.0)
)
raw_optional = define(
    "raw_optional(Tensor x, Tensor(a!)? state=None) -> Tensor",
    lambda x, state=None: x + 1 if state is None else (by_memory(state, 5.0), x + 1)[1],
)
raw_list = define(
    "raw_list(Tensor(a!)[] xs) -> ()", lambda xs: [by_memory(x, 2.0) for x in xs] and None
)
raw_two = define(
    "raw_two(Tensor(a!) x, Tensor(b!) y) -> ()",
    lambda x, y: [by_memory(each, 2.0) for each in (x, y)] and None,
)
raw_sum = define("raw_sum(Tensor x) -> Tensor", lambda x: x.sum(1))
raw_view = define("raw_view(Tensor(a) x) -> Tensor(a)", lambda x: x[0])


def overridable(t):
    """A function of another library, which supports classes like ours and writes by a kernel."""
    if has_torch_function_unary(t):
        return handle_torch_function(overridable, (t,), t)
    t.sort()
    by_memory(t, 2.0)
    return None


OPERATORS = {
    "mutates": lambda t: scale_inplace(t, 2.0),
    "mutates, by packet": lambda t: torch.ops.zero_writers.scale_inplace(t, 2.0),
    "mutates memory": scale_by_memory,
    "mutates a row": lambda t: scale_by_memory(t[1]),
    "mutates a transposed": lambda t: scale_by_memory(t.t()),
    "mutates nothing": lambda t: scaled(t, 2.0),
    "mutates nothing, two results": statistics,
    "mutates the first": lambda t: mixed(t, like(t)),
    "mutates another": lambda t: (m := like(t), mixed(m, t), m)[0],
    "mutates both, one of them read": lambda t: mixed(t, t + 1),
    "mutates a list": lambda t: many([t, like(t)], torch.ones(SIZE, SIZE)),
    "mutates a list of others": lambda t: (m := like(t), many([m], t), m)[0],
    "mutates unknown arguments": unknown,
    "raw": raw,
    "raw, returned": raw_returned,
    "raw out": lambda t: raw_out(torch.ones(2), out=t),
    "raw out of": lambda t: (m := like(t), raw_out(t, out=m), m)[0],
    "raw optional": lambda t: raw_optional(t),
    "raw optional, given": lambda t: raw_optional(torch.ones(2), t),
    "raw list": lambda t: raw_list([t]),
    "raw two": lambda t: (m := like(t), raw_two(m, t), m)[0],
    "raw, no write": raw_sum,
    "raw, a view": raw_view,
    "overridable": overridable,
}


# ---------------------------------------------------------------- in place


def embed(t):
    return F.embedding(torch.tensor([0, 2]), t, max_norm=0.5)


def adam(t):
    zeros = [torch.zeros(SIZE, SIZE) for _ in range(2)]
    torch._fused_adam_(
        [t], [torch.ones(SIZE, SIZE)], zeros[:1], zeros[1:], [], [torch.tensor(1.0)], lr=0.1,
        beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def index_rows(t):
    t[torch.tensor([0, 2])] = 0.5


INPLACE = {
    "mul_": lambda t: t.mul_(2),
    "copy_": lambda t: t.copy_(like(t) / like(t)),
    "relu_": F.relu_,
    "relu, in place": lambda t: F.relu(t, inplace=True),
    "hardtanh, in place": lambda t: F.hardtanh(t, -0.5, 0.5, inplace=True),
    "dropout, in place": lambda t: F.dropout(t, 0.0, inplace=True),
    "clamp, out": lambda t: torch.clamp(torch.ones(SIZE, SIZE), max=0.5, out=t),
    "mm, out": lambda t: torch.mm(torch.ones(SIZE, SIZE), torch.ones(SIZE, SIZE), out=t),
    "index": index_rows,
    "index_copy_": lambda t: t.index_copy_(0, torch.tensor([1]), torch.ones(1, SIZE)),
    "index_add_": lambda t: t.index_add_(0, torch.tensor([1]), torch.ones(1, SIZE)),
    "scatter_": lambda t: t.scatter_(0, torch.tensor([[1]]), 0.5),
    "put_": lambda t: t.put_(torch.tensor([1]), torch.tensor([0.5])),
    "fill_diagonal_": lambda t: t.fill_diagonal_(3.0),
    "masked_scatter_": lambda t: t.masked_scatter_(torch.eye(SIZE).bool(), torch.ones(SIZE)),
    "renorm_": lambda t: t.renorm_(2, 0, 0.4),
    "cumsum_": lambda t: t.cumsum_(0),
    "sort, out": lambda t: torch.sort(t.clone(), out=(t, torch.empty(0, dtype=torch.long))),
    "addmm_": lambda t: t.addmm_(torch.ones(SIZE, 2), torch.ones(2, SIZE)),
    "tril_": lambda t: t.tril_(),
    "embedding with a largest norm": embed,
    "fused Adam": adam,
    "foreach": lambda t: torch._foreach_mul_([t, torch.ones(2)], 2.0),
    "init": lambda t: nn.init.constant_(t, 0.25),
    "init eye": nn.init.eye_,
    "init orthogonal": lambda t: nn.init.orthogonal_(t),
    "through a view": lambda t: t.view(-1)[3:5].fill_(9.0),
    "through a transposed view": lambda t: t.t()[0].fill_(9.0),
}


# ---------------------------------------------------------------- another memory


def swap(t):
    torch.utils.swap_tensors(t, nn.Parameter(torch.ones(SIZE, SIZE)))


def assign(t):
    t.data = torch.ones(SIZE, SIZE)


REPOINTING = {
    "data": assign,
    "set_": lambda t: t.set_(torch.ones(SIZE, SIZE)),
    "set_ from a storage": lambda t: t.set_(
        torch.ones(SIZE, SIZE).untyped_storage(), 0, (SIZE, SIZE), (SIZE, 1)
    ),
    "set_ to nothing": lambda t: t.set_(),
    "set_ of another shape": lambda t: t.set_(torch.ones(3)),
    "resize_": lambda t: t.resize_(2 * SIZE, SIZE),
    "resize_ to its size": lambda t: t.resize_(SIZE, SIZE),
    "resize_as_": lambda t: t.resize_as_(torch.ones(2)),
    "t_": lambda t: t.t_(),
    "transpose_": lambda t: t.transpose_(0, 1),
    "swapaxes_": lambda t: t.swapaxes_(0, 1),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "squeeze_": lambda t: t.squeeze_(),
    "as_strided_": lambda t: t.as_strided_((SIZE,), (1,)),
    "storage resized": lambda t: t.untyped_storage().resize_(1024),
    "swap_tensors": swap,
}

WRITERS = {**COLLECTIVES, **OPERATORS, **INPLACE}
TENSORS = {
    "p": lambda p: p,
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.detach().clone(),
    "zeros": torch.zeros_like,
    "grad": lambda p: p.grad,
}


def full(value):
    if isinstance(value, (list, tuple)):
        return [full(each) for each in value]
    if not isinstance(value, Tensor):
        return None
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value).clone()


def same(ours, expected):
    if isinstance(ours, list):
        return len(ours) == len(expected) and all(map(same, ours, expected))
    if not isinstance(ours, Tensor):
        return ours is expected or type(ours) is type(expected)
    return ours.shape == expected.shape and torch.allclose(ours, expected, atol=1e-6)


def outcome(write, tensor, net, reference):
    """Outcome "equal"; "refused", with the name and the way out; or what is wrong."""
    theirs, expected, torch_error = called(write, tensor, reference)
    ours, result, error = called(write, tensor, net)
    way = "full_grad(" if getattr(ours, "role", "") == "p.grad" else "gathered("
    texts = [None, None]
    dist.all_gather_object(texts, error)
    is_refused = texts != [None, None]
    pairs = [] if is_refused else [(full(result), full(expected)), (full(ours), full(theirs))]
    with gathered(net):  # in stage 1 each rank has its own values until the next step
        pairs.append((net.weight.detach().clone(), VALUES if is_refused else reference.weight))
    with gathered(net, writeback=True):
        net.weight.copy_(VALUES)
    is_clear = error is None or torch_error is not None or ("weight" in error and way in error)
    if not is_clear:
        return f"unclear: {error}"
    if not is_refused and torch_error is not None:
        return f"torch raises {torch_error}"
    for found, right in pairs:
        if not same(found, right):
            return f"{found}, expected {right}; refused: {is_refused}"
    return "refused" if is_refused else "equal"


def called(write, tensor, net):
    """The tensor, the result of `write` or None, and the text of its error or None."""
    given, result, error = tensor(net.weight), None, None
    torch.manual_seed(0)
    try:
        result = write(given)
    except Exception as refused:
        error = f"{type(refused).__name__}: {refused}"
    return given, result, error


VALUES = Net().weight.detach().clone()


def _write(rank, world_size, stage):
    net = Net()
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.1)], ZeroConfig(stage=stage))
    x = torch.linspace(-1, 1, 8).view(2, SIZE)
    found = {}
    for name, tensor in TENSORS.items():
        for title, write in WRITERS.items():
            reference = Net()
            if name == "grad":
                reference(x).backward()
                engine.zero_grad()
                engine.backward(net(x))
            with torch.no_grad():
                found[name, title] = outcome(write, tensor, net, reference)
    engine.step()
    return found


def _list(rank, world_size, stage):
    net = Net()
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.1)], ZeroConfig(stage=stage))
    found = {}
    for name, tensor in TENSORS.items():
        for title, write in LISTS.items():
            reference = Net()
            reference(torch.ones(2, SIZE)).backward()
            engine.zero_grad()
            engine.backward(net(torch.ones(2, SIZE)))
            with torch.no_grad():
                theirs, *_ = called(write, tensor, reference)
                ours, _, error = called(write, tensor, net)
            is_right = error is not None or same(full(ours), full(theirs))
            found[name, title] = "refused" if error else "equal" if is_right else str(full(ours))
            with gathered(net, writeback=True), torch.no_grad():
                net.weight.copy_(VALUES)
    return found


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_list_in_which_torch_does_not_look_for_shards_does_not_crash_a_collective(stage):
    """No rank gets wrong values: it has the right ones, or an error."""
    (found,) = run_ranks(1, _list, stage)
    assert set(found.values()) <= {"equal", "refused"}, found


def _repoint(rank, world_size, stage):
    found = {}
    for name in ("p", "data", "detach", "clone", "grad"):
        for title, write in REPOINTING.items():
            found[name, title] = repointed(write, TENSORS[name], stage)
    return found


def repointed(write, tensor, stage):
    """Outcome of two steps after `write`: "equal", "refused", or what is wrong."""
    x = torch.linspace(-1, 1, 8).view(2, SIZE)
    reference = Net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    torch_error = trained(
        write, tensor, reference, lambda: reference(x).backward(), optimizer.step,
        optimizer.zero_grad,
    )  # fmt: skip
    net = Net()
    engine = Engine(net, [torch.optim.SGD(net.parameters(), lr=0.1)], ZeroConfig(stage=stage))
    error = trained(
        write, tensor, net, lambda: engine.backward(net(x)), engine.step, engine.zero_grad
    )
    if error is not None:
        is_clear = "weight" in error and ("gathered(" in error or "full_grad(" in error)
        is_clear |= "Cannot swap" in str(error)  # of torch, before it swaps
        return "refused" if is_clear or torch_error is not None else f"unclear: {error}"
    if torch_error is not None:
        return f"torch raises {torch_error}"
    with gathered(net):
        values = net.weight.detach().clone()
    engine.close()  # the last values are those that a user gets
    is_right = same(values, reference.weight) and same(net.weight, reference.weight)
    return "equal" if is_right else f"{values}, expected {reference.weight}"


def trained(write, tensor, net, backward, step, zero_grad):
    """Writes before the first of two steps, and after the last; returns the text of an error."""
    try:
        for is_last in (False, False, True):
            backward()
            with torch.no_grad():
                write(tensor(net.weight))
            if not is_last:
                step()
                zero_grad()
    except Exception as refused:
        return f"{type(refused).__name__}: {refused}"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_tensor_gets_another_memory_as_in_torch_or_by_one_error(stage):
    for found in run_ranks(2, _repoint, stage):
        assert set(found.values()) <= {"equal", "refused"}, found
        assert {found["p", title] for title in ("data", "set_")} == {"equal"}
        assert found["p", "swap_tensors"] == "refused"


DATA_EQUAL = "data", "equal"
# Writes in place to more than elements, or to some of them, in stage 3.
REFUSED_INPLACE = {
    "addmm_",
    "cumsum_",
    "embedding with a largest norm",
    "fill_diagonal_",
    "fused Adam",
    "index",
    "index_add_",
    "index_copy_",
    "init eye",
    "masked_scatter_",
    "mm, out",
    "put_",
    "renorm_",
    "scatter_",
    "sort, out",
    "through a transposed view",
    "through a view",
    "tril_",
}
# Torch does not say that the output of these is a parameter; they fail when they write.
TORCHS_TEXT = [
    ("p", title)
    for title in (
        "all_gather_into_tensor, into",
        "reduce_scatter_tensor",
        "all_to_all",
        "all_to_all_single",
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_functions_that_may_write_do_as_in_torch_or_raise_one_error(stage):
    for found in run_ranks(2, _write, stage, timeout_s=240):
        wrong = {
            key: text
            for key, text in found.items()
            if text not in ("equal", "refused")
            and not (key in TORCHS_TEXT and text.startswith("unclear: RuntimeError"))
        }
        assert not wrong, wrong
        equal = {title for (name, title), text in found.items() if (name, text) == DATA_EQUAL}
        elementwise = {*INPLACE, "all_gather_object"} - REFUSED_INPLACE  # that one pickles
        assert equal == (set(WRITERS) if stage == 1 else elementwise)


# ---------------------------------------------------------------- the last values of a fit


class Halved(nn.Module):
    def forward(self, weight):
        return weight * 0.5


class Parametrized(Recorder):
    """Removes a parametrization when training ends, which points the parameter at new memory."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        parametrize.register_parametrization(self.net[0], "weight", Halved())

    def part_loss(self, part, rank):
        x, y = part
        return F.mse_loss(self.net(x), y)

    def on_train_end(self):
        parametrize.remove_parametrizations(self.net[0], "weight")
        with torch.no_grad():
            self.net[0].bias.set_(torch.ones(8))


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_parametrization_that_is_removed_when_training_ends_leaves_the_values_of_ddp(stage):
    factory = partial(Parametrized, ranks=2)
    assert_same(fit_ranks(2, settings(stage), factory), fit_reference(2, factory), rtol=1e-5)
