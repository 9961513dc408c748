"""Random training programs, run by an engine on real ranks and by plain torch in one process.

A program is a list of steps, each of which computes micro-batches and then does some of what people
do to a model in training. The plain side computes the gradients of all ranks one after the other
with a plain module, averages them and steps the same optimizer, so it shares no code with the
engine. Both sides write down numbers as they go; the two lists must be equal. Everything is
computed in float64, where Adam's division amplifies no rounding.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_zero import Engine, ZeroConfig, gathered
from lightning_zero.checkpoint.states import full_state_dict
from lightning_zero.optim.state import load_optimizer_state_dict, optimizer_state_dict

WIDTH = 6
TOLERANCE = 1e-8

BLOCKS = (
    "linear",
    "in place",
    "norm",
    "batch norm",
    "own parameter",
    "tied",
    "branch",
    "unused",
    "checkpointed",
    "half frozen",
    "read from outside",
)
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.005),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.02),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
}
# What may happen in a step, at four moments: in the first forward, between backward and step,
# after the step with gradients, and after they were zeroed.
IN_FORWARD = ("hold alias",)
BEFORE_STEP = ("clip norm", "clip value", "forward without gradients", "scale data")
AFTER_STEP = ("hold gradient",)
BETWEEN = (
    "assign data",
    "average of weights",
    "deepcopy",
    "exchange data",
    "forward without gradients",
    "freeze",
    "lerp",
    "new engine",
    "scale data",
    "state dict",
)


@dataclass(frozen=True)
class Step:
    """One step of the optimizer: micro-batches, and what happens around them."""

    num_micro_batches: int
    sets_to_none: bool
    actions: tuple[tuple[str, int], ...]  # name and a number that chooses the parameter


@dataclass(frozen=True)
class Program:
    """What both sides run; it follows from the seed alone."""

    seed: int
    world_size: int
    blocks: tuple[str, ...]
    optimizer: str
    steps: tuple[Step, ...]
    settings: tuple[dict[str, Any], ...]  # of the engines, one after the other

    @classmethod
    def of(cls, seed: int, *, world_size: int | None = None) -> Program:
        """The program of a seed; `world_size` replaces the one that it draws."""
        draw = random.Random(seed)
        drawn_size = draw.choice((1, 2, 2, 3, 4))
        size = world_size or drawn_size
        blocks = tuple(draw.choice(BLOCKS) for _ in range(draw.randint(2, 5)))
        steps = tuple(_draw_step(draw) for _ in range(draw.randint(2, 5)))
        num_engines = 1 + sum(name == "new engine" for step in steps for name, _ in step.actions)
        settings = tuple(_draw_settings(draw, size) for _ in range(num_engines))
        return cls(seed, size, blocks, draw.choice(list(OPTIMIZERS)), steps, settings)


def _draw_step(draw: random.Random) -> Step:
    actions = [
        (draw.choice(names), draw.randrange(1000))
        for names in (IN_FORWARD, BEFORE_STEP, AFTER_STEP, BETWEEN, BETWEEN)
        if draw.random() < 0.4
    ]
    return Step(draw.choice((1, 1, 2, 3)), draw.random() < 0.7, tuple(actions))


def _draw_settings(draw: random.Random, world_size: int) -> dict[str, Any]:
    stage = draw.choice((0, 1, 2, 3, 3, 3))
    settings: dict[str, Any] = {"stage": stage, "reduce_bucket_size": draw.choice((20, 60, 10**6))}
    nvme = {"device": "nvme", "nvme_path": "."}
    if stage:
        settings["offload_optimizer"] = draw.choice((None, None, "cpu", nvme))
        settings["overlap_step"] = draw.random() < 0.2
        if world_size in (2, 4) and draw.random() < 0.25:
            settings["sharding_group_size"] = world_size // 2
    if stage == 3:
        settings["offload_param"] = draw.choice((None, None, "cpu", nvme))
        settings["reshard_after_forward"] = draw.choice((None, True, False))
        settings["prefetch_bucket_size"] = draw.choice((0, 60, 10**6))
        settings["param_persistence_threshold"] = draw.choice((0, 0, 10))
    return {key: value for key, value in settings.items() if value is not None}


# -------------------------------------------------------------------- the model


class Block(nn.Module):
    """One repeated block, of one of the kinds in `BLOCKS`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        # A bias before a batch norm has a gradient of rounding errors, which Adafactor scales up.
        self.first = nn.Linear(WIDTH, WIDTH, bias=kind != "batch norm")
        if kind in ("tied", "branch", "unused"):
            self.second = nn.Linear(WIDTH, WIDTH)
        if kind == "tied":
            self.second.weight = self.first.weight
        if kind == "norm":
            self.norm = nn.LayerNorm(WIDTH)
        if kind == "batch norm":
            self.norm = nn.BatchNorm1d(WIDTH)
        if kind == "own parameter":
            self.scale = nn.Parameter(torch.rand(WIDTH, 1) + 0.5)
        if kind == "half frozen":
            self.first.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, 2, WIDTH)
        if self.kind == "checkpointed":
            return x + checkpoint(self._compute, x, use_reentrant=False)
        return x + self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.kind == "in place":
            return y.relu_()
        if self.kind == "tied":
            y = self.second(torch.tanh(y))
        elif self.kind == "branch" and x.detach().sum() > 0:
            y = self.second(y)
        elif self.kind == "norm":
            y = self.norm(y)
        elif self.kind == "batch norm":
            y = self.norm(y.transpose(1, 2)).transpose(1, 2)
        elif self.kind == "own parameter":
            y = y @ (self.scale * self.scale.T)
        return torch.tanh(y)


class Model(nn.Module):
    """Blocks between two layers; returns a loss."""

    def __init__(self, program: Program, device: torch.device | str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.begin = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for kind in program.blocks)
        self.end = nn.Linear(WIDTH, 1)
        self.to(device, torch.float64)
        self.in_forward: list[Any] = []  # called in the next forward

    def forward(self, x: Tensor) -> Tensor:  # (batch, 2, 3)
        y = self.begin(x)
        for block in self.blocks:
            y = block(y)
            if block.kind == "read from outside":
                y = y + 0.01 * block.first.weight.square().mean()
        calls, self.in_forward = self.in_forward, []
        for call in calls:
            call()
        return self.end(y).square().mean()


def _batch(program: Program, rank: int, step: int, micro_batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash((program.seed, rank, step, micro_batch)) % 2**31)
    return torch.randn(3, 2, 3, generator=generator, dtype=torch.float64)


# -------------------------------------------------------------------- the two sides


@dataclass
class Side:
    """One side of a program: how it computes, and what it has seen."""

    program: Program
    module: Model
    optimizer: Optimizer
    device: str = "cpu"
    seen: list[tuple[str, float]] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)

    @classmethod
    def begin(cls, program: Program, device: str = "cpu", **more: Any) -> Any:
        module = Model(program, device)
        optimizer = OPTIMIZERS[program.optimizer](module.parameters())
        return cls(program, module, optimizer, device, **more)

    def run(self) -> list[tuple[str, float]]:
        for number, step in enumerate(self.program.steps):
            for name, choice in step.actions:
                if name in IN_FORWARD:
                    self.module.in_forward.append(partial(self.act, name, number, choice))
            self.backward(number, step)
            self.act_all(BEFORE_STEP, number, step)
            self.step()
            self.act_all(AFTER_STEP, number, step)
            self.zero_grad(step.sets_to_none)
            self.act_all(BETWEEN, number, step)
        self.note("end", self.values())
        return self.seen

    def batch(self, rank: int, step: int, micro_batch: int) -> Tensor:
        return _batch(self.program, rank, step, micro_batch).to(self.device)

    def act_all(self, names: Sequence[str], number: int, step: Step) -> None:
        for name, choice in step.actions:
            if name in names:
                self.act(name, number, choice)

    def note(self, name: str, values: Sequence[Tensor]) -> None:
        self.seen += [(name, float(value.double().norm())) for value in values]

    def act(self, name: str, number: int, choice: int) -> None:
        """Performs the action `name` in the same way on both sides, as a user would write it."""
        parameters = list(self.module.parameters())
        p = parameters[choice % len(parameters)]
        same_shape = [q for q in parameters if q is not p and q.shape == p.shape]
        match name:
            case "hold alias":
                self.held.append(p.detach())
            case "hold gradient":
                self.hold_gradient(p)
            case "scale data":
                p.data.mul_(0.9)
            case "assign data":
                p.data = p.data * 0.9
            case "exchange data" if same_shape:
                p.data, same_shape[0].data = same_shape[0].data, p.data
            case "lerp" if same_shape:
                with torch.no_grad():
                    p.lerp_(same_shape[0], 0.25)
            case "freeze":
                p.requires_grad_(not p.requires_grad)
            case "average of weights":
                backup = {q: q.data for q in parameters}
                for q in parameters:
                    q.data = q.data * 0.5
                self.forward_without_gradients(number)
                for q in parameters:
                    q.data = backup[q]
            case "forward without gradients":
                self.forward_without_gradients(number)
            case "clip norm":
                self.clip_norm(0.1)
            case "clip value":
                self.clip_value(0.01)
            case "state dict":
                state = self.module.state_dict()
                self.note(name, [v for k, v in state.items() if "norm" not in k])
            case "deepcopy":
                copied = copy.deepcopy(self.module)
                self.note(name, [q.detach() for q in copied.parameters()])
            case "new engine":
                self.renew()


class Plain(Side):
    """One process that computes for all ranks."""

    def backward(self, number: int, step: Step) -> None:
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        size = self.program.world_size
        sums: list[Tensor | None] = [None] * len(parameters)
        calls, self.module.in_forward = self.module.in_forward, []
        before = [p.data.clone() for p in self.module.parameters()]
        for micro_batch in range(step.num_micro_batches):
            for rank in range(size):
                if micro_batch == 0 and calls:  # each rank writes in its own first forward
                    for parameter, values in zip(self.module.parameters(), before, strict=True):
                        parameter.data.copy_(values)
                    self.module.in_forward = list(calls)
                loss = self.module(self.batch(rank, number, micro_batch))
                self.seen.append((f"loss of rank {rank}", loss.item()))
                share = loss / step.num_micro_batches / size
                grads = torch.autograd.grad(share, parameters, allow_unused=True)
                for index, grad in enumerate(grads):
                    if grad is not None:
                        known = sums[index]
                        sums[index] = grad if known is None else known + grad
        for parameter, total in zip(parameters, sums, strict=True):
            if total is not None:
                old = parameter.grad
                parameter.grad = total if old is None else old + total

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self, sets_to_none: bool) -> None:
        self.optimizer.zero_grad(sets_to_none)

    def clip_norm(self, limit: float) -> None:
        self.note("norm", [nn.utils.clip_grad_norm_(self.module.parameters(), limit)])

    def clip_value(self, limit: float) -> None:
        nn.utils.clip_grad_value_(self.module.parameters(), limit)

    def hold_gradient(self, p: nn.Parameter) -> None:
        if p.grad is not None:
            self.note("gradient", [p.grad])

    def forward_without_gradients(self, number: int) -> None:
        with torch.no_grad():
            for rank in range(self.program.world_size):
                loss = self.module(self.batch(rank, number, 99))
                self.seen.append((f"loss of rank {rank}", loss.item()))

    def values(self) -> list[Tensor]:
        return [p.detach() for p in self.module.parameters()]

    def renew(self) -> None:
        """Drops gradients that were zeroed in place: a new module has none."""
        self.optimizer.zero_grad(set_to_none=True)


@dataclass
class Sharded(Side):
    """One rank of several, with an engine."""

    rank: int = 0
    engine: Engine = field(init=False)
    num_engines: int = 0

    def __post_init__(self) -> None:
        self._open()

    def _open(self) -> None:
        settings = self.program.settings[self.num_engines]
        self.num_engines += 1
        self.engine = Engine(self.module, [self.optimizer], ZeroConfig(**settings))

    def backward(self, number: int, step: Step) -> None:
        for micro_batch in range(step.num_micro_batches):
            is_last = micro_batch == step.num_micro_batches - 1
            with nullcontext() if is_last else self.engine.no_sync():
                loss = self.module(self.batch(self.rank, number, micro_batch))
                self.seen.append((f"loss of rank {self.rank}", loss.item()))
                self.engine.backward(loss / step.num_micro_batches)

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self, sets_to_none: bool) -> None:
        self.engine.zero_grad(sets_to_none)

    def clip_norm(self, limit: float) -> None:
        self.note("norm", [self.engine.clip_grad_norm_(limit)])

    def clip_value(self, limit: float) -> None:
        self.engine.clip_grad_value_(limit)

    def hold_gradient(self, p: nn.Parameter) -> None:
        if p.grad is not None:
            self.note("gradient", [p.grad])
            self.held.append(p.grad)

    def forward_without_gradients(self, number: int) -> None:
        with torch.no_grad():
            loss = self.module(self.batch(self.rank, number, 99))
        self.seen.append((f"loss of rank {self.rank}", loss.item()))

    def values(self) -> list[Tensor]:
        # Whatever they show, they must be there. Freed memory of a device can not be read.
        for tensor in self.held if self.device == "cpu" else ():
            tensor.sum()
        with gathered(self.module):
            return [p.detach().clone() for p in self.module.parameters()]

    def renew(self) -> None:
        """Saves, and goes on from the files in a new module with other settings."""
        state = full_state_dict(self.engine)
        recipient = self.rank == 0
        states = optimizer_state_dict(self.optimizer, self.engine.buckets, is_recipient=recipient)
        name = f"{self.program.seed}.{self.num_engines}.pt"
        if self.rank == 0:
            torch.save((state, states), name)
        trained = [p.requires_grad for p in self.module.parameters()]
        self.engine.comm.control.gather_objects(None)  # the file is there
        self.engine.close()
        state, states = torch.load(name)
        self.module = Model(self.program, self.device)
        self.module.load_state_dict(state)
        for parameter, is_trained in zip(self.module.parameters(), trained, strict=True):
            parameter.requires_grad_(is_trained)
        self.optimizer = OPTIMIZERS[self.program.optimizer](self.module.parameters())
        self._open()
        load_optimizer_state_dict(self.optimizer, states)


def run_plain(program: Program, device: str = "cpu") -> list[tuple[str, float]]:
    return Plain.begin(program, device).run()


def run_sharded(rank: int, world_size: int, seeds: Sequence[int], device: str = "cpu") -> list[Any]:
    """On one of the ranks: by seed what was seen, or the error of a program."""
    outcomes: list[Any] = []
    for seed in seeds:
        side = Sharded.begin(Program.of(seed, world_size=world_size), device, rank=rank)
        outcomes.append(side.run())
        side.engine.close()
    return outcomes


def differences(plain: Sequence[tuple[str, float]], ranks: Sequence[Any]) -> Iterator[str]:
    """Where the ranks have seen other numbers than the plain side."""
    for rank, seen in enumerate(ranks):
        own = [
            pair for pair in plain if not pair[0].startswith("loss") or pair[0].endswith(f" {rank}")
        ]
        if [name for name, _ in own] != [name for name, _ in seen]:
            yield f"rank {rank} has seen {[n for n, _ in seen]}, expected {[n for n, _ in own]}"
            continue
        for index, ((name, expected), (_, found)) in enumerate(zip(own, seen, strict=True)):
            if not abs(found - expected) <= TOLERANCE * max(1.0, abs(expected)):
                yield f"rank {rank}, number {index}: {name} is {found!r}, expected {expected!r}"
                break
