"""Every layer of `torch.nn` with parameters, in 16 bits: what runs under DDP runs here."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves

import lightning_zero
from lightning_zero.layout.keep_float32 import AUTOCAST, float32_parameters
from tests.support.warm import run_ranks

WIDTH = 8
Shape = tuple[int, ...]
TOKENS = torch.arange(6).view(2, 3)


@dataclass(frozen=True)
class Layer:
    """How to build a layer, and what it takes: arguments of a dtype, several times."""

    build: Callable[[], nn.Module]
    calls: Callable[[torch.dtype], list[tuple[Tensor | None, ...]]]


def takes(*shapes: Shape | tuple[Shape, ...]) -> Callable[..., list[tuple[Tensor, ...]]]:
    """Calls with one tensor of each shape, or with several."""
    calls = [shape if isinstance(shape[0], tuple) else (shape,) for shape in shapes]
    return lambda dtype: [tuple(torch.randn(s).to(dtype) for s in call) for call in calls]


ANY_DIM = takes((4, WIDTH), (2, 3, WIDTH), (2, 2, 3, WIDTH), (2, 2, 2, 3, WIDTH))
OF_CHANNELS = takes(
    (4, WIDTH), (2, WIDTH, 3), (2, WIDTH, 3, 3), (2, WIDTH, 3, 3, 3), (2, WIDTH, 3, 3)
)
SEQUENCES = takes((4, WIDTH), (4, 2, WIDTH))
PAIRS = takes(((4, WIDTH), (4, WIDTH)), ((3, 2, WIDTH), (3, 2, WIDTH)))


def of_images(dims: int, *, is_batched: bool = False) -> Callable[..., list[tuple[Tensor, ...]]]:
    image = (WIDTH, *(4,) * dims)
    return takes((2, *image)) if is_batched else takes(image, (2, *image))


def of_tokens(dtype: torch.dtype) -> list[tuple[Tensor | None, ...]]:
    return [(TOKENS[0],), (TOKENS,), (TOKENS[None],)]


def of_bags(dtype: torch.dtype) -> list[tuple[Tensor | None, ...]]:
    weights = torch.rand(2, 3).to(dtype)
    return [(TOKENS,), (TOKENS.flatten(), torch.tensor([0, 2])), (TOKENS, None, weights)]


def of_targets(dtype: torch.dtype) -> list[tuple[Tensor | None, ...]]:
    targets = torch.tensor([0, 3, 6, 9, 12, 19])
    return [(torch.randn(6, WIDTH).to(dtype), targets)]


def _conv(dims: int) -> dict[str, Layer]:
    names = (f"Conv{dims}d", f"ConvTranspose{dims}d")
    return {n: Layer(partial(getattr(nn, n), WIDTH, 6, 3), of_images(dims)) for n in names}


def _norms(dims: int) -> dict[str, Layer]:
    batched = of_images(dims, is_batched=True)
    return {
        f"BatchNorm{dims}d": Layer(partial(getattr(nn, f"BatchNorm{dims}d"), WIDTH), batched),
        f"InstanceNorm{dims}d": Layer(
            partial(getattr(nn, f"InstanceNorm{dims}d"), WIDTH, affine=True), of_images(dims)
        ),
    }


def _transformer(**options: bool) -> dict[str, Layer]:
    layer = {"dropout": 0.0, **options}
    encoder = partial(nn.TransformerEncoderLayer, WIDTH, 2, 16, **layer)
    decoder = partial(nn.TransformerDecoderLayer, WIDTH, 2, 16, **layer)
    stacked = partial(nn.Transformer, WIDTH, 2, 1, 1, 16, **layer)
    return {
        "TransformerEncoderLayer": Layer(encoder, SEQUENCES),
        "TransformerDecoderLayer": Layer(decoder, PAIRS),
        "TransformerEncoder": Layer(
            lambda: nn.TransformerEncoder(encoder(), 2, nn.LayerNorm(WIDTH)), SEQUENCES
        ),
        "TransformerDecoder": Layer(
            lambda: nn.TransformerDecoder(decoder(), 2, nn.LayerNorm(WIDTH)), PAIRS
        ),
        "Transformer": Layer(stacked, PAIRS),
    }


LAYERS: dict[str, Layer] = {
    "Linear": Layer(partial(nn.Linear, WIDTH, 6), ANY_DIM),
    "Bilinear": Layer(
        partial(nn.Bilinear, WIDTH, 6, 3),
        takes(*(((*lead, WIDTH), (*lead, 6)) for lead in ((4,), (2, 3), (2, 2, 3), (2,) * 4))),
    ),
    **_conv(1),
    **_conv(2),
    **_conv(3),
    **_norms(1),
    **_norms(2),
    **_norms(3),
    "LayerNorm": Layer(partial(nn.LayerNorm, WIDTH), ANY_DIM),
    "LayerNorm of images": Layer(partial(nn.LayerNorm, (WIDTH, 4, 4)), of_images(2)),
    "RMSNorm": Layer(partial(nn.RMSNorm, WIDTH), ANY_DIM),
    "RMSNorm of matrices": Layer(partial(nn.RMSNorm, (3, WIDTH)), takes((2, 3, WIDTH))),
    "GroupNorm": Layer(partial(nn.GroupNorm, 2, WIDTH), OF_CHANNELS),
    "PReLU": Layer(nn.PReLU, ANY_DIM),
    "PReLU of channels": Layer(partial(nn.PReLU, WIDTH), OF_CHANNELS),
    "RNN": Layer(partial(nn.RNN, WIDTH, 6, nonlinearity="relu"), SEQUENCES),
    "GRU": Layer(partial(nn.GRU, WIDTH, 6, bidirectional=True), SEQUENCES),
    "LSTM": Layer(partial(nn.LSTM, WIDTH, 6, num_layers=2), SEQUENCES),
    "LSTM with a projection": Layer(partial(nn.LSTM, WIDTH, 6, proj_size=3), SEQUENCES),
    "RNNCell": Layer(partial(nn.RNNCell, WIDTH, 6), takes((WIDTH,), (4, WIDTH))),
    "GRUCell": Layer(partial(nn.GRUCell, WIDTH, 6), takes((WIDTH,), (4, WIDTH))),
    "LSTMCell": Layer(partial(nn.LSTMCell, WIDTH, 6), takes((WIDTH,), (4, WIDTH))),
    "Embedding": Layer(partial(nn.Embedding, 9, WIDTH, padding_idx=1), of_tokens),
    "EmbeddingBag": Layer(partial(nn.EmbeddingBag, 9, WIDTH, mode="sum"), of_bags),
    "AdaptiveLogSoftmaxWithLoss": Layer(
        partial(nn.AdaptiveLogSoftmaxWithLoss, WIDTH, 20, [5, 10], head_bias=True), of_targets
    ),
    "MultiheadAttention": Layer(
        partial(nn.MultiheadAttention, WIDTH, 2, add_bias_kv=True),
        takes(((4, WIDTH),) * 3, ((3, 2, WIDTH),) * 3),
    ),
    "MultiheadAttention of other widths": Layer(
        partial(nn.MultiheadAttention, WIDTH, 2, kdim=4, vdim=6),
        takes(((3, 2, WIDTH), (3, 2, 4), (3, 2, 6))),
    ),
    **_transformer(),
    **{f"{n}, pre-norm": layer for n, layer in _transformer(norm_first=True).items()},
    "weight_norm": Layer(lambda: parametrizations.weight_norm(nn.Linear(WIDTH, 6)), ANY_DIM),
    "spectral_norm": Layer(lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, 6)), ANY_DIM),
    "orthogonal": Layer(lambda: parametrizations.orthogonal(nn.Linear(WIDTH, 6)), ANY_DIM),
}
TESTED_IN_OTHER_FILES = {
    "SyncBatchNorm",  # has no kernel on a CPU
    "RNNBase",
    "RNNCellBase",
    "ParameterList",
    "ParameterDict",
    "Module",
}


@pytest.mark.slow
def test_the_table_has_every_layer_that_makes_parameters():
    kinds = {n: kind for n, kind in vars(nn).items() if inspect.isclass(kind)}
    made = {n for n, k in kinds.items() if issubclass(k, nn.Module) and _makes_parameters(k)}
    assert {"Linear", "LayerNorm", "LSTM", "Embedding", "Conv3d"} <= made
    missing = {
        n for n in made if not n.startswith(("Lazy", "_")) and n not in TESTED_IN_OTHER_FILES
    }
    assert missing <= set(LAYERS)


def _makes_parameters(kind: type[nn.Module]) -> bool:
    sources = [inspect.getsource(k) for k in kind.__mro__ if k not in (nn.Module, object)]
    return any("Parameter(" in source for source in sources)


Arguments = tuple[Tensor | None, ...]


class Calls(nn.Module):
    """One of many layers is called, several times.

    Attributes:
        now: The call under way, for people.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: layer.build() for name, layer in LAYERS.items()})
        self.now = ""

    def forward(self, name: str, calls: list[Arguments]) -> Tensor:
        losses = []
        for args in calls:
            like = [None if a is None else (tuple(a.shape), a.dtype) for a in args]
            self.now = f"{name} of {like}"
            losses.append(_loss(self.layers[name](*args)))
        return torch.stack(losses).sum()


def _loss(output: object) -> Tensor:
    leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    weighted = [t.float() * torch.arange(t.numel()).view(t.shape).cos() for t in leaves]
    return torch.stack([t.sum() for t in weighted]).sum()


def _calls_that_run(name: str, layer: nn.Module, dtype: torch.dtype) -> list[Arguments]:
    """Those of float32 and 16-bit inputs that run where nothing was cast before."""
    found = []
    for of_input in (torch.float32, dtype):
        for args in LAYERS[name].calls(of_input):
            with contextlib.suppress(RuntimeError), torch.autocast("cpu", dtype):
                layer(*args)
                found.append(args)
    return found


def _compare(rank, world_size, stage, dtype):
    """What is not as in one process under autocast, and how many calls were made.

    DDP casts nothing, and with the same inputs on every rank its gradients are those of one.
    """
    torch.manual_seed(0)
    own = Calls()
    reference = copy.deepcopy(own)
    settings = {"keep_float32": "autocast", "reduce_bucket_size": 4096}
    config = lightning_zero.ZeroConfig(stage=stage, param_dtype=dtype, **settings)
    engine = lightning_zero.Engine(own, config=config)
    failures, num_calls = [], 0
    for name in LAYERS:
        torch.manual_seed(1)
        calls = _calls_that_run(name, copy.deepcopy(reference.layers[name]), dtype)
        num_calls += len(calls)
        with torch.autocast("cpu", dtype):
            expected = reference(name, calls)
            try:
                loss = own(name, calls)
            except RuntimeError as error:
                failures.append(f"{own.now}: {error}")
                continue
        expected.backward()
        engine.backward(loss)
        grads = [p.grad for p in reference.layers[name].parameters()]
        found = [lightning_zero.full_grad(p) for p in own.layers[name].parameters()]
        problem = _difference([loss, *found], [expected, *grads])
        failures += [f"{name}: {problem}"] * bool(problem)
        engine.zero_grad()
    return failures, num_calls


def _difference(found: list[Tensor | None], expected: list[Tensor | None]) -> str:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if other is None or one is None:
            if (one is None or not one.any()) and (other is None or not other.any()):
                continue
            return f"gradient {index} is {one}, expected {other}"
        distance = float((one - other).norm() / (other.norm() + 1e-3))
        if not distance < 0.05:
            return f"gradient {index} is off by {distance:.3f}" if index else f"{one} != {other}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        (1, torch.bfloat16),
        (3, torch.bfloat16),
        (3, torch.float16),
        pytest.param(1, torch.float16, marks=pytest.mark.slow),
    ],
)
def test_every_layer_that_runs_under_ddp_and_autocast_runs_here_with_the_same_gradients(
    stage, dtype
):
    """Float32 and 16-bit inputs of 2 to 5 dimensions."""
    for failures, num_calls in run_ranks(2, _compare, stage, dtype):
        assert not failures, "\n".join([f"{len(failures)} differ:", *failures])
        assert num_calls > 200


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.weight_norm])
def test_what_older_norms_compute_a_weight_from_stays_as_it_is(norm):
    """Such modules cannot be copied, so they are not in the table."""
    module = nn.Sequential(norm(nn.Linear(WIDTH, 6)), nn.Linear(6, 1))
    kept = float32_parameters(dict(module.named_modules()), [AUTOCAST])
    assert kept == set(module[0].parameters())
