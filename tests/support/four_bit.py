"""Frozen weights of 4 bits beside trained adapters, as in QLoRA."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models import Recorder

__all__ = ["LINEARS", "FourBitModule", "PackedLinear"]

_LEVELS = torch.linspace(-1, 1, 16)
_BLOCK = 32


class _Scales:
    """Quant state of bitsandbytes: data needed next to the codes."""

    def __init__(self, absmax: Tensor) -> None:
        self.absmax = absmax


class Packed(nn.Parameter):
    """Two codes of 4 bits in each byte, in a storage of any dtype: never trained, nor cast."""

    quant_state: _Scales

    def __new__(cls, data: Tensor, quant_state: _Scales) -> Packed:
        self = torch.Tensor._make_subclass(cls, data, False)
        self.quant_state = quant_state
        return self

    @classmethod
    def of(cls, values: Tensor, storage: torch.dtype) -> Packed:
        blocks = values.detach().reshape(-1, _BLOCK)
        absmax = blocks.abs().amax(dim=1)
        nearest = (blocks / absmax[:, None]).unsqueeze(-1) - _LEVELS
        codes = nearest.abs().argmin(dim=-1).view(-1, 2).to(torch.uint8)
        packed = codes[:, 0] * 16 + codes[:, 1]
        return cls(packed.view(storage).unsqueeze(1), _Scales(absmax))

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        return Packed(self.data.clone(), _Scales(self.quant_state.absmax.clone()))

    def floats(self) -> Tensor:
        packed = self.data.view(-1).view(torch.uint8)
        codes = torch.stack([packed // 16, packed % 16], dim=1).long()
        return (_LEVELS[codes].view(-1, _BLOCK) * self.quant_state.absmax[:, None]).view(-1)


class PackedLinear(nn.Linear):
    """Stands for Linear4bit of bitsandbytes: saves its scales, too, but does not load them."""

    def __init__(self, in_features: int, out_features: int, quant_storage: torch.dtype) -> None:
        super().__init__(in_features, out_features)
        self.weight: Any = Packed.of(self.weight, quant_storage)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        absmax = self.weight.quant_state.absmax
        destination[prefix + "weight.absmax"] = absmax if keep_vars else absmax.detach()
        packed = torch.tensor([_BLOCK, self.in_features])  # made anew each time
        destination[prefix + "weight.quant_state.packed"] = packed

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.floats().view(self.out_features, self.in_features).to(x.dtype)
        return F.linear(x, weight, self.bias.to(x.dtype))


def _bitsandbytes(in_features: int, out_features: int, quant_storage: torch.dtype) -> nn.Module:
    from bitsandbytes.nn import Linear4bit

    return Linear4bit(in_features, out_features, quant_type="nf4", quant_storage=quant_storage).to(
        "cpu"
    )  # which quantizes


LINEARS = {"tests": PackedLinear, "bitsandbytes": _bitsandbytes}
LIBRARIES = [name for name in LINEARS if importlib.util.find_spec(name) is not None]


class FourBitModule(Recorder):
    """Two frozen layers of 4 bits, each with an adapter beside it."""

    def __init__(
        self,
        library: str = "tests",
        quant_storage: torch.dtype = torch.uint8,
        base_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        build = LINEARS[library]
        torch.manual_seed(base_seed)
        self.bases = nn.ModuleList(
            [build(8, 64, quant_storage), build(64, 64, quant_storage)]
        ).requires_grad_(False)
        torch.manual_seed(0)
        self.adapters = nn.ModuleList([nn.Linear(8, 64), nn.Linear(64, 64)])
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Output of shape (samples, 3)."""
        for base, adapter in zip(self.bases, self.adapters, strict=True):
            x = (base(x) + adapter(x)).tanh()
        return self.head(x)

    def part_loss(self, part: list[Tensor], rank: int) -> Tensor:
        x, y = part
        return F.mse_loss(self(x), y)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)
