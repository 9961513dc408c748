"""Trains a small model of a scenario on a fake device."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_zero
from lightning_zero.engine.shadow import Shadow
from lightning_zero.layout.offload import Tier
from lightning_zero.optim import chunks
from lightning_zero.record.spans import Kind
from tests.streams.clocks import Clocks
from tests.streams.fake_cuda import DEVICE
from tests.streams.scenarios import Scenario
from tests.streams.seeded_faults import seed

__all__ = ["Net", "loss_of", "train"]

_NUM_STEPS = 4  # the order of all-gathers is replayed after two equal steps
_VOCABULARY, _WIDTH, _TOKENS = 512, 32, 8


class _FailureError(Exception):
    """Optimizer of the model."""


def _fail(grad: Tensor) -> None:
    raise _FailureError


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.head = nn.Linear(_WIDTH, _VOCABULARY)
        self.register_buffer("scale", torch.ones(1))
        self.failing = ""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1 and self.failing == "forward":
                raise _FailureError
            if number == 1 and self.failing == "backward":
                x.register_hook(_fail)
        return self.head(x) * self.scale


def loss_of(module: nn.Module, device: torch.device) -> Tensor:
    ids = torch.zeros(2, _TOKENS, dtype=torch.long, device=device)
    return F.cross_entropy(module(ids).float().flatten(0, 1), ids.flatten())


def train(
    scenario: Scenario, clocks: Clocks
) -> tuple[dict[str, int], int, dict[str, int], dict[str, int]]:
    """Trains; inside `FakeCuda.on`.

    Returns:
        In the last step: waits of the host; the number of launches; those of compute beside each
        other stream, by its name; and the bytes of copies, by kind, if they are recorded.
    """
    seed(scenario.fault)
    chunks.MAX_NUMEL_PER_CALL["cuda"] = (
        1500  # two blocks of a rank; the embedding and the head have more
    )
    training = _Training(scenario)
    for number in range(_NUM_STEPS):
        is_last = number == _NUM_STEPS - 1
        if is_last:
            training.look()
            clocks.syncs.clear()
            clocks.launches.clear()
            clocks.beside.clear()
            training.begin_recording()
        training.step()
    beside: Counter[str] = Counter()
    for number, count in clocks.beside.items():
        beside[clocks.names[number]] += count
    found = dict(clocks.syncs), sum(clocks.launches.values()), dict(beside), training.copied()
    training.end()
    return found


class _Training:
    def __init__(self, scenario: Scenario) -> None:
        self._options = scenario.options
        with DEVICE:
            self._module = Net()
            average = Net() if "average" in self._options else None
        self._optimizers = _optimizers_of(scenario.optimizer, self._module)
        config: dict[str, Any] = dict(scenario.config)
        self._scaler: torch.amp.GradScaler | None = None
        if scenario.precision != "fp32":
            is_bf16 = scenario.precision == "bf16"
            config["param_dtype"] = torch.bfloat16 if is_bf16 else torch.float16
            self._scaler = None if is_bf16 else torch.amp.GradScaler("cuda")
        self._engine = lightning_zero.Engine(
            self._module,
            self._optimizers,
            lightning_zero.ZeroConfig(**config),
            device=DEVICE,
        )
        self._shadow = Shadow(self._engine, average) if average is not None else None
        self._offload = lightning_zero.offload_activations(min_bytes=1, num_prefetched=2)
        if "edits" in self._options:
            self._edit()

    def step(self) -> None:
        """All of one step of the optimizer."""
        is_accumulating = "accumulate" in self._options
        if is_accumulating:
            with self._engine.no_sync():
                self._backward()
        self._backward()
        if "evaluation" in self._options:
            self._evaluate()
        if self._scaler is not None:
            self._engine.finish_reductions()
            for optimizer in self._optimizers:
                if "unscaled by the step" not in self._options:
                    self._scaler.unscale_(optimizer)
        if "clip" in self._options:
            self._engine.clip_grad_norm_(1.0)
        if self._scaler is not None:
            for optimizer in self._optimizers:
                self._scaler.step(optimizer)
            self._scaler.update()
        else:
            self._engine.step()
        if self._shadow is not None:
            with self._shadow.shard_views(write_back=False), torch.no_grad():
                pairs = zip(
                    self._shadow.module.parameters(), self._module.parameters(), strict=True
                )
                for average, parameter in pairs:
                    average.lerp_(parameter.to(average.device), 0.1)
        self._engine.zero_grad()

    def _backward(self) -> None:
        with self._offload if "activations" in self._options else nullcontext():
            loss = loss_of(self._module, DEVICE)
        self._engine.backward(loss if self._scaler is None else self._scaler.scale(loss))

    def look(self) -> None:
        """What a user does between two steps."""
        if "failures" in self._options:
            for self._module.failing in ("forward", "backward"):
                try:
                    self._backward()
                except _FailureError:
                    self._engine.ensure_run()
                else:
                    raise AssertionError("nothing has failed")
            self._module.failing = ""
            self.step()
        if "offloaded states" in self._options:
            self._engine.offload_states()
            self._engine.reload_states()
        if "edits" in self._options:
            self._evaluate()
            self._edit()
        if "looks" not in self._options:
            return
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    value.cpu()
        with lightning_zero.gathered(self._module, writeback=True), torch.no_grad():
            for parameter in self._module.parameters():
                parameter.mul_(0.5).sum().cpu()
        self._evaluate()

    def _edit(self) -> None:
        with torch.no_grad():
            for parameter in self._module.parameters():
                parameter.mul_(0.5)

    def _evaluate(self) -> None:
        with torch.no_grad():
            self._module(torch.zeros(2, _TOKENS, dtype=torch.long, device=DEVICE))

    def begin_recording(self) -> None:
        if "recorded" in self._options:
            self._engine.recorder.begin(_NUM_STEPS - 1)

    def copied(self) -> dict[str, int]:
        """Bytes of copies since `begin_recording`, by kind; and elements stepped on the CPU."""
        if "recorded" not in self._options:
            return {}
        recording = self._engine.recorder.end()
        stepped = [b for b in self._engine.buckets if b.plan.tiers.optim is not Tier.DEVICE]
        return {
            **{kind.value: recording.nbytes(kind) for kind in (Kind.TO_CPU, Kind.TO_DEVICE)},
            "stepped": sum(bucket.shards.ensure_master().numel for bucket in stepped),
        }

    def end(self) -> None:
        """After the last step."""
        assert bool(self._offload.nbytes) == ("activations" in self._options)
        if self._shadow is not None:
            with self._shadow.shard_views(write_back=True), torch.no_grad():
                pairs = zip(
                    self._shadow.module.parameters(), self._module.parameters(), strict=True
                )
                for average, parameter in pairs:
                    parameter.copy_(average)
            self._shadow.unwrap(None)
        self._engine.close()
        for parameter in self._module.parameters():
            parameter.data.add_(1.0)
        for optimizer in self._optimizers:
            optimizer.state.clear()


def _optimizers_of(name: str, module: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(module.parameters())
    if name == "adamw":
        return [torch.optim.AdamW(parameters, fused=True)]
    if name == "foreach":
        return [torch.optim.AdamW(parameters, foreach=True)]
    if name == "tensor rate":
        return [torch.optim.AdamW(parameters, lr=torch.ones((), device=DEVICE), fused=True)]
    assert name == "muon", name
    matrices = [p for p in parameters if p.dim() == 2]
    others = [p for p in parameters if p.dim() != 2]
    return [torch.optim.Muon(matrices), torch.optim.AdamW(others, fused=True)]
