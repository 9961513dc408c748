"""Trains a small model with every optimizer class of many packages, sharded and on one process.

    python -m tests.tools.optimizers                          # all, as a table
    python -m tests.tools.optimizers timm torch.optim.Muon    # packages and classes by name
    python -m tests.tools.optimizers --write tests/benchmarks/2026-11-28-optimizers.md

Two ranks train in stages 1 and 3 on gradients of their own; the reference is one process on the
mean of both gradients, with the same optimizer. The data flow of an optimizer that is stepped by
elements must be elementwise, too. For packages that are not installed one line stands
in the table. Some optimizers need arguments beside the parameters: see `_build`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import inspect
import os
import pkgutil
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from lightning_zero import Engine, ZeroConfig
from lightning_zero.optim.probe import StepKind, probe
from tests.support.ranks import RankError, run_ranks
from tests.tools.data_flow.probe import trace

__all__ = ["Outcome", "classes_of", "main"]

PACKAGES = {
    "torch.optim": "torch",
    "schedulefree": "schedulefree",
    "prodigyopt": "prodigyopt",
    "dadaptation": "dadaptation",
    "lion_pytorch": "lion-pytorch",
    "adabelief_pytorch": "adabelief-pytorch",
    "adan_pytorch": "adan-pytorch",
    "torch_optimizer": "torch-optimizer",
    "pytorch_optimizer": "pytorch_optimizer",
    "timm.optim": "timm",
    "bitsandbytes.optim": "bitsandbytes",
    "torchao.optim": "torchao",
    "transformers.optimization": "transformers",
}  # by importable name, that of the distribution
NUM_STEPS = 5
_NUM_TOGETHER = 8  # classes that the same processes train with
STAGES = (1, 3)
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
_ABSTRACT = {
    "Optimizer",
    "BaseOptimizer",
    "Optimizer2State",
    "Optimizer1State",
    "Optimizer8bit",
    "SafeFP16Optimizer",
}
_EXACT = 2e-6  # largest difference, of values about 1; a wrong step of 0.01 is far above it


@dataclass(frozen=True)
class Outcome:
    """What came of one optimizer class.

    Attributes:
        stepped: The way of stepping, or that it is refused.
        result: The largest difference, or the reason.
        is_silent: Other values than on one process, without an error.
    """

    stepped: str
    result: str
    is_silent: bool = False


class Model(nn.Module):
    """Tensors of 4, 2, 1 and 0 dimensions; one matrix is large enough to be stored in blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 2)
        self.layers = nn.Sequential(
            nn.Linear(15, 64), nn.Tanh(), nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 3)
        )
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.conv(x).tanh().flatten(1)) * self.scale


class Matrices(nn.Module):
    """For optimizers that step matrices alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 64, bias=False), nn.Tanh(), nn.Linear(64, 3, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))


# -------------------------------------------------------------------- classes


def classes_of(package: str) -> list[str]:
    """Full names of the optimizer classes that a package shows; empty if it is not installed."""
    names = []
    for module in _modules_of(package):
        for name, kind in sorted(vars(module).items()):
            is_kind = isinstance(kind, type) and issubclass(kind, Optimizer)
            if not is_kind or name != kind.__name__ or name in _ABSTRACT or name[0] == "_":
                continue
            if kind.__module__.startswith(package.partition(".")[0]):
                names.append(f"{module.__name__}.{name}")
    own = {name.rpartition(".")[2]: name for name in names}
    return sorted(own.values())


def _modules_of(package: str) -> list[types.ModuleType]:
    with contextlib.suppress(ImportError):
        return [importlib.import_module(package)]
    # timm itself wants torchvision, which its optimizers do without.
    parent = package.partition(".")[0]
    folders = [Path(path, *package.split(".")) for path in sys.path]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        return []
    for name, path in ((parent, folder.parent), (package, folder)):
        stub = types.ModuleType(name)
        stub.__path__ = [str(path)]
        sys.modules[name] = stub
    modules = []
    for found in pkgutil.iter_modules([str(folder)]):
        if not found.name.startswith("_"):
            with contextlib.suppress(ImportError):
                modules.append(importlib.import_module(f"{package}.{found.name}"))
    return modules


def _class_of(name: str) -> type[Optimizer]:
    package = next(p for p in PACKAGES if name.startswith(f"{p}."))
    classes_of(package)  # imports it, or what can be imported of it
    module, _, own = name.rpartition(".")
    kind: type[Optimizer] = getattr(importlib.import_module(module), own)
    return kind


def _build(kind: type[Optimizer], module: nn.Module, *, is_grouped: bool = False) -> Optimizer:
    """An optimizer of the module; what it needs beside parameters is given by its name.

    `is_grouped`: Matrices are in a group with `use_muon`, others in one without.
    """
    parameters = inspect.signature(kind).parameters
    arguments: dict[str, Any] = {}
    first, *others = [p for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
    given: Any = list(module.parameters())
    if is_grouped:
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for parameter in module.parameters():
            groups[parameter.dim() == 2].append(parameter)
        given = [{"params": held, "use_muon": is_muon} for is_muon, held in groups.items()]
    if first.name in ("optimizer", "base"):
        given = torch.optim.SGD(given, lr=1e-2)
    elif first.name in ("model", "module"):
        given = module
    elif first.name in ("named_parameters", "named_params"):
        given = list(module.named_parameters())
    known = {"base_optimizer": torch.optim.SGD, "model": module, "max_lr": 1e-2, "lr": 1e-2}
    for option in others:
        is_small = option.name == "lr" and (option.default is None or option.default < 1e-2)
        if option.default is option.empty or is_small:
            arguments[option.name] = known.get(option.name, 10)
    if "relative_step" in parameters:  # of Adafactors, beside which they take no rate
        arguments["relative_step"] = False
    if "base_optimizer" in arguments:
        arguments["lr"] = 1e-2
    return kind(given, **arguments)


# -------------------------------------------------------------------- training


def _train(
    built: Callable[[], tuple[nn.Module, Optimizer]], rank: int | None, stage: int = 0
) -> list[Tensor]:
    """Parameters after some steps: of a rank, or (`rank` is None) of one process."""
    module, optimizer = built()
    data = torch.Generator().manual_seed(1)
    engine = None if rank is None else Engine(module, [optimizer], ZeroConfig(stage=stage))
    if callable(begin := getattr(optimizer, "train", None)):
        begin()
    for _ in range(NUM_STEPS):
        x, y = torch.randn(2, 4, 1, 2, 4, generator=data), torch.randn(2, 4, 3, generator=data)
        if engine is not None:
            engine.backward(F.mse_loss(module(x[rank]), y[rank]))
            engine.step()
            engine.zero_grad()
            continue
        means = [torch.zeros_like(p) for p in module.parameters()]
        for one, target in zip(x, y, strict=True):
            grads = torch.autograd.grad(F.mse_loss(module(one), target), [*module.parameters()])
            torch._foreach_add_(means, grads)
        for parameter, mean in zip(module.parameters(), means, strict=True):
            parameter.grad = mean / 2
        optimizer.step()
        optimizer.zero_grad()
    if engine is not None:
        engine.close()
    return [parameter.detach().clone() for parameter in module.parameters()]


def _try_on_rank(rank: int, world_size: int, names: Sequence[str]) -> list[Outcome]:
    warnings.simplefilter("ignore")
    torch.compiler.set_stance("force_eager")
    return [_try(rank, _class_of(name)) for name in names]


def _built(
    kind: type[Optimizer], model: Callable[[], nn.Module], is_grouped: bool
) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    module = model()
    return module, _build(kind, module, is_grouped=is_grouped)


def _try(rank: int, kind: type[Optimizer]) -> Outcome:
    """Trains with one class on one process and in all stages. Collective."""
    failure: Exception | None = None
    for model, is_grouped in ((Model, False), (Model, True), (Matrices, False)):
        built = partial(_built, kind, model, is_grouped)
        try:
            expected = _train(built, None)
        except Exception as error:
            failure = failure or error
        else:
            break
    else:
        if issubclass(kind, torch.optim.SparseAdam):  # the models have no sparse gradients
            return Outcome("refused", "it needs sparse gradients, but flat buffers are dense")
        return Outcome("fails on one process, too", _line(failure))
    try:
        found = probe(built()[1], torch.device("cpu"))
    except ValueError as error:
        for stage in STAGES:
            try:
                _train(built, rank, stage)
            except ValueError as refusal:
                if "cannot be s" not in str(refusal):  # sharded, stepped
                    return Outcome(f"stage {stage} FAILS", _line(refusal), is_silent=True)
            else:
                return Outcome(f"stage {stage} TRAINS", _reason(str(error)), is_silent=True)
        return Outcome("refused", _reason(str(error)))
    if found.is_elementwise and not _is_traced_elementwise(built()[1]):
        return Outcome("by elements", "DIFFERENT: its data flow is not elementwise", is_silent=True)
    stepped = "by elements" if found.is_elementwise else "full tensors, by their owners"
    if found.kind is StepKind.AT_ONCE:
        stepped += ", in one call"
    largest = 0.0
    for stage in STAGES:
        for one, other in zip(_train(built, rank, stage), expected, strict=True):
            difference = float((one - other).abs().nan_to_num(torch.inf).max())
            largest = max(largest, difference / max(1.0, float(other.abs().max())))
    if not all(bool(values.isfinite().all()) for values in expected):
        return Outcome(stepped, "one process comes to values that are not finite")
    is_silent = largest > _EXACT
    return Outcome(stepped, f"{'DIFFERENT: ' if is_silent else ''}{largest:.0e}", is_silent)


def _is_traced_elementwise(optimizer: Optimizer) -> bool:
    try:
        return trace(optimizer, torch.device("cpu")).is_elementwise
    except ValueError:
        return False


def _try_all(names: Sequence[str]) -> list[Outcome]:
    """Many together; those that die, one by one."""
    try:
        ranks = run_ranks(2, _try_on_rank, names, timeout_s=60 + 20 * len(names))
    except RankError as error:
        if len(names) == 1:
            return [Outcome("FAILS", _line(error), is_silent=True)]
        return [outcome for name in names for outcome in _try_all([name])]
    return [max(pair, key=lambda outcome: outcome.is_silent) for pair in zip(*ranks, strict=True)]


def _line(error: BaseException | None) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = next(
        (line for line in reversed(lines) if re.match(r"(E +)?[\w.]+(Error|Exception)", line)), ""
    )
    text = last or (lines[-1] if lines else type(error).__name__)
    return text.replace("|", "/")[:200]


def _reason(text: str) -> str:
    text = text.partition(": ")[2].partition(". Sharding it")[0].partition(". If it steps")[0]
    return text.partition(". Use an optimizer")[0].replace("|", "/").replace("\n", " ")[:300]


# -------------------------------------------------------------------- the table


def _rows(wanted: Sequence[str]) -> Iterator[tuple[str, Outcome | None]]:
    """Rows of the table; for a package that is not installed, its name alone."""
    for package in PACKAGES:
        names = classes_of(package)
        if wanted:
            names = [n for n in names if package in wanted or n in wanted]
        elif not names:
            yield package, None
        for start in range(0, len(names), _NUM_TOGETHER):
            together = names[start : start + _NUM_TOGETHER]
            yield from zip(together, _try_all(together), strict=True)


def _row(name: str, outcome: Outcome | None) -> str:
    if outcome is None:
        return f"| `{name}` | not installed | |"
    return f"| `{name}` | {outcome.stepped} | {outcome.result} |"


def _versions() -> str:
    found = []
    for distribution in PACKAGES.values():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(distribution).partition("+")[0]
            found.append(f"{distribution} {version}")
    return ", ".join(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the table; the number of classes that are silently different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("wanted", nargs="*", help="packages or classes; default: all")
    parser.add_argument("--write", type=Path, help="dated page whose table is replaced")
    options = parser.parse_args(arguments)
    rows, num_silent = [], 0
    for name, outcome in _rows(options.wanted):
        rows.append(_row(name, outcome))
        num_silent += outcome is not None and outcome.is_silent
        print(rows[-1], flush=True)
    if options.write is not None:
        head = (
            "| optimizer | how it is stepped | largest difference, or the reason |\n|---|---|---|"
        )
        table = "\n".join([f"Made with {_versions()}.", "", head, *rows, ""])
        before, _, rest = options.write.read_text().partition(BEGIN)
        options.write.write_text(before + BEGIN + table + END + rest.partition(END)[2])
    return num_silent


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the docstring."""


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
