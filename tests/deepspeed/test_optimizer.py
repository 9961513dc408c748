"""Optimizer and scheduler sections are one error, whose lines of torch step as DeepSpeed does."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from lightning_zero import ZeroStrategy
from lightning_zero.deepspeed import translate

ARGS = SimpleNamespace(
    learning_rate=0.5, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6, weight_decay=0.2,
    warmup_steps=4,
)  # fmt: skip


AUTOS = ("lr", "betas", "eps", "weight_decay")


def lines_for(**sections):
    with pytest.raises(ValueError, match="Remove this part, and write in configure_opt") as caught:
        translate(sections)
    return str(caught.value).partition("configure_optimizers:\n\n")[2]


def configured(parameters, num_steps=8, **sections):
    """What the lines of the error return, as the body of configure_optimizers."""
    body = lines_for(**sections)
    if "args." in body:
        body = body.replace("args = ...", "args = ARGS")
    lr = re.search("with lr=(.*)", body)
    own = f"optimizer = torch.optim.SGD(self.parameters(), lr={lr[1] if lr else 0.5})"
    body = re.sub(r"optimizer = \.\.\..*", own, body)
    scope = {"torch": torch, "ARGS": ARGS}
    exec(f"def configure_optimizers(self):\n{body}\n", scope)
    trainer = SimpleNamespace(estimated_stepping_batches=num_steps)
    module = SimpleNamespace(parameters=lambda: parameters, trainer=trainer)
    return scope["configure_optimizers"](module)


@pytest.fixture
def parameters():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]


@pytest.mark.parametrize(
    ("section", "reference"),
    [
        ({"type": "Adam"}, lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0)),
        (
            {"type": "Adam", "params": {"lr": 0.1, "weight_decay": 0.2, "adam_w_mode": False}},
            lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.2),
        ),
        (
            {"type": "adamw", "params": {"lr": 0.1, "betas": [0.8, 0.9], "adam_w_mode": False}},
            lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9), weight_decay=0.0),
        ),
        (
            {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.01),
        ),
        (
            {"type": "AdamW", "params": dict.fromkeys(AUTOS, "auto")},
            lambda p: torch.optim.AdamW(p, lr=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2),
        ),
        (
            {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        ),
        ({"type": "Adagrad", "params": {"lr": 0.1}}, lambda p: torch.optim.Adagrad(p, lr=0.1)),
    ],
)  # fmt: skip
def test_the_lines_step_as_deepspeeds_optimizer(parameters, section, reference):
    mirror = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    optimizers = configured(parameters, optimizer=section), reference(mirror)
    assert type(optimizers[0]) is type(optimizers[1])
    for _ in range(3):
        for parameter, other in zip(parameters, mirror, strict=True):
            parameter.grad = torch.sin(parameter.detach())
            other.grad = torch.sin(other.detach())
        for optimizer in optimizers:
            optimizer.step()
    for parameter, other in zip(parameters, mirror, strict=True):
        torch.testing.assert_close(parameter, other)


def test_adam_is_fused_as_with_cpu_offload(parameters):
    file = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    }
    with pytest.raises(ValueError, match="from_deepspeed does not read the optimizer of") as caught:
        ZeroStrategy.from_deepspeed(file)
    line = "torch.optim.AdamW(self.parameters(), weight_decay=0.0, lr=0.1, fused=True)"
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "Lamb", "params": {"lr": 1}}, "is DeepSpeed's 'Lamb' with {'lr': 1}"),
        ({"type": "OneBitAdam"}, "DeepSpeed's 'OneBitAdam'"),
        ({"type": "Muon"}, "DeepSpeed's 'Muon'"),
        ({"type": "Optimizer"}, "DeepSpeed's 'Optimizer'"),
        ({"params": {}}, "DeepSpeed's 'None'"),
        ({"type": "Adam", "params": {"bias_correction": False}}, "has no bias_correction=False"),
        ({"type": "SGD", "params": {"lr": 1, "max_grad_norm": 1}}, "SGD has no max_grad_norm=1"),
    ],
)  # fmt: skip
def test_what_torch_lacks_is_named(section, message):
    assert message in lines_for(optimizer=section)


# DeepSpeed counts from -1: the first two steps of a warm-up use its minimum.

LINEAR = {"warmup_num_steps": 4, "warmup_type": "linear"}
DECAY = [0, 0, 0.1, 0.2, 0.3, 0.4, 0.3, 0.2, 0.1, 0, 0]


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("WarmupLR", {**LINEAR, "warmup_max_lr": 0.4}, [0, 0, 0.1, 0.2, 0.3, 0.4, 0.4]),
        ("WarmupLR", {**LINEAR, "warmup_max_lr": "auto"}, [0, 0, 0.125, 0.25, 0.375, 0.5, 0.5]),
        ("WarmupLR", {**LINEAR, "warmup_num_steps": "auto"}, [0, 0, 0.125, 0.25, 0.375, 0.5, 0.5]),
        (
            "WarmupLR",
            {"warmup_num_steps": 4, "warmup_min_lr": 0.1, "warmup_max_lr": 0.2},
            [0.1, 0.1, 0.15, 0.1 + 0.1 * math.log(3, 4), 0.2, 0.2],
        ),
        ("WarmupDecayLR", {**LINEAR, "warmup_max_lr": 0.4, "total_num_steps": 8}, DECAY),
        ("WarmupDecayLR", {**LINEAR, "warmup_max_lr": 0.4, "total_num_steps": "auto"}, DECAY),
        ("WarmupDecayLR", LINEAR, [0, 0, 0.00025, 0.0005, 0.00075, 0.001, 0.00075]),
        (
            "WarmupCosineLR",
            {**LINEAR, "warmup_min_ratio": 0.2, "cos_min_ratio": 0.1, "total_num_steps": 6},
            [0, 0.1, 0.2, 0.3, 0.4, 0.275, 0.05, 0.05],
        ),
    ],
)
@pytest.mark.parametrize("optimizer", [{"type": "SGD", "params": {"lr": 0.5}}, {}])
def test_the_lines_have_deepspeeds_learning_rates(parameters, optimizer, name, params, expected):
    both = {"optimizer": optimizer, "scheduler": {"type": name, "params": params}}
    result = configured(parameters, **both)
    optimizer, schedule = result["optimizer"], result["lr_scheduler"]
    assert schedule["interval"] == "step"
    seen = []
    for _ in expected:
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule["scheduler"].step()
    assert seen == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "section",
    [
        {"type": "OneCycle", "params": {"cycle_max_lr": 1}},
        {"type": "WarmupLR", "params": {"warmup_type": "cubic"}},
        {"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2]}},
    ],
)
def test_a_schedule_that_torch_lacks_is_named(section):
    lines = lines_for(scheduler=section)
    assert re.search(f"no scheduler that is DeepSpeed's '{section['type']}' with {{", lines)
    assert "scheduler = ..." in lines
