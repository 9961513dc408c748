"""Optimizer classes of which it is known whether they step each element independently.

[Note: Known optimizers] The values of a few steps do not show that an optimizer is elementwise: a
threshold may never be reached, a norm may be clipped. The data flow of a step does. It was traced
for every class of thirteen packages, and all classes of two of them are refused. An optimizer of
another class steps full tensors on their owners, which is right for all that do not combine
tensors.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

__all__ = ["known_elementwise", "refusal_reason", "unhooked"]

_HOOKED = Optimizer.profile_hook_step(lambda self: None).__code__

# Class names by top-level package. `python -m tests.tools.optimizers` checks them.
_ELEMENTWISE = {
    "lightning_zero": "AdamW8bit Lion8bit SGD8bit",
    "torch": "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD",
    "schedulefree": (
        "AdamWScheduleFree AdamWScheduleFreePaper AdamWScheduleFreeReference RAdamScheduleFree "
        "SGDScheduleFree SGDScheduleFreeReference"
    ),
    "lion_pytorch": "Lion",
    "adabelief_pytorch": "AdaBelief",
    "adan_pytorch": "Adan",
    "torch_optimizer": (
        "AccSGD AdaBelief AdaBound AdaMod AggMo DiffGrad MADGRAD PID QHAdam QHM RAdam SGDW Yogi"
    ),
    "pytorch_optimizer": (
        "ADOPT AccSGD AdEMAMix AdaBelief AdaBound AdaDelta AdaMax AdaMod AdaPNM AdaSmooth AdamC "
        "AdamG AdamWSN Adan AggMo Ano BCOS DiffGrad DualAdam EXAdam FOCUS FTRL GrokFastAdamW Kate "
        "LaProp Lion MADGRAD MSVAG PAdam PID PNM QHM RAdam SGDW SPAM SRMM ScheduleFreeAdamW "
        "ScheduleFreeRAdam ScheduleFreeSGD SignSGD SimplifiedAdEMAMix Tiger VSGD Yogi"
    ),
    "timm": (
        "AdaBelief AdamWLegacy Adan Adopt LaProp Lion MADGRAD NAdamLegacy NAdamW RAdamLegacy "
        "RMSpropTF SGDW"
    ),
}
# Those that look at full tensors.
_OF_TENSORS = {
    "torch": "Adafactor Muon",
    "torch_optimizer": (
        "A2GradExp A2GradInc A2GradUni Adafactor AdamP Apollo LARS Lamb NovoGrad SGDP SWATS Shampoo"
    ),
    "pytorch_optimizer": (
        "A2Grad APOLLO AdaFactor AdaGO AdaMuon AdaNorm AdaShift AdaTAM Adalite AdamMini AdamP Aida "
        "Amos ApolloDQN CAME FAdam Fira FlashAdamW Fromage GaLore Grams LARS Lamb MARS Muon "
        "MuonClip Nero NorMuon NovoGrad RACS ROSE Ranger SCION SCIONLight SGDP SGDSaI SM3 SOAP "
        "SPlus SWATS Shampoo SpectralSphere StableAdamW StableSPAM TAM"
    ),
    "timm": "Adafactor AdafactorBigVision AdamP Lamb Lars Mars Muon NvNovoGrad",
    "bitsandbytes": (
        "AdEMAMix AdEMAMix8bit Adagrad Adagrad32bit Adagrad8bit Adam Adam32bit Adam8bit AdamW "
        "AdamW32bit AdamW8bit LAMB LAMB32bit LAMB8bit Lion Lion32bit Lion8bit PagedAdEMAMix "
        "PagedAdEMAMix8bit PagedAdam PagedAdam32bit PagedAdam8bit PagedAdamW PagedAdamW32bit "
        "PagedAdamW8bit PagedLion PagedLion32bit PagedLion8bit RMSprop RMSprop32bit RMSprop8bit"
    ),
    "torchao": "Adam4bit Adam8bit AdamFp8 AdamW4bit AdamW8bit AdamWFp8",
    "transformers": "Adafactor",
}
# Those that combine tensors in a way that a probe does not show, with the reason.
_LOSS = "it uses the loss of its closure, which differs between ranks"
_OTHERS = "the update of each parameter depends on the gradients of other parameters"
_RANDOM = (
    "it draws random numbers, and each rank would draw other numbers than one process that steps "
    "all parameters"
)
_REFUSED = {
    ("pytorch_optimizer", "Alice"): _RANDOM,
    ("pytorch_optimizer", "Conda"): _LOSS,
    ("pytorch_optimizer", "EmoFact"): _LOSS,
    ("pytorch_optimizer", "EmoLynx"): _LOSS,
    ("pytorch_optimizer", "EmoNavi"): _LOSS,
    ("pytorch_optimizer", "Ranger21"): _OTHERS,
    ("pytorch_optimizer", "ScalableShampoo"): _LOSS,
}
_KNOWN = {
    (package, name): is_elementwise
    for table, is_elementwise in ((_ELEMENTWISE, True), (_OF_TENSORS, False))
    for package, names in table.items()
    for name in names.split()
}


def known_elementwise(kind: type[Optimizer]) -> bool | None:
    """Whether a class is elementwise; None: it is not known. See [Note: Known optimizers].

    A subclass counts as its parent if it overrides nothing of it, except special methods such as
    its constructor.
    """
    own: set[str] = set()
    for parent in kind.__mro__:
        found = _KNOWN.get((parent.__module__.partition(".")[0], parent.__name__))
        if found is not None:
            names = (n for n in own if hasattr(parent, n) and not n.startswith("__"))
            is_same = all(
                unhooked(getattr(kind, name)) is unhooked(getattr(parent, name)) for name in names
            )
            return found if is_same else None
        own |= vars(parent).keys()
    return None


def unhooked(function: Any) -> Any:
    """A function, without the wrapper that torch puts around the `step` of each class."""
    is_hooked = getattr(function, "__code__", None) is _HOOKED
    return function.__wrapped__ if is_hooked else function


def refusal_reason(kind: type[Optimizer]) -> str | None:
    """Reason why a class cannot be sharded, where a probe does not show it; None: there is none."""
    keys = ((parent.__module__.partition(".")[0], parent.__name__) for parent in kind.__mro__)
    return next((_REFUSED[key] for key in keys if key in _REFUSED), None)
