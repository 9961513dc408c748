"""Calls on a sharded tensor that are one error: they need, or would write, elements of other ranks.

By title, which begins with the function's name in the error.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

__all__ = ["WITHDRAWN"]


@torch.library.custom_op("zero_withdrawn::scale_inplace", mutates_args=("x",))
def scale_inplace(x: torch.Tensor, factor: float) -> None:
    x.mul_(factor)


def _like(t):
    return torch.ones(t.shape)


def _set_row(t):
    t[0] = 1.0


def _set_masked(t):
    t[t.new_ones(t.shape, dtype=torch.bool)] = 1.0


def _fused_adam(t):
    zeros = [torch.zeros(t.shape) for _ in range(2)]
    torch._fused_adam_(
        [t], [_like(t)], zeros[:1], zeros[1:], [], [torch.tensor(1.0)], lr=0.1, beta1=0.9,
        beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


READS = {
    "__getitem__, row": lambda t: t[0],
    "__getitem__, element": lambda t: t[0, 0],
    "__getitem__, mask": lambda t: t[_like(t) > 0],
    "__getitem__, indices": lambda t: t[torch.tensor([0, 2])],
    "unbind, iteration": list,
    "select": lambda t: t.select(0, 1),
    "narrow": lambda t: t.narrow(0, 1, 2),
    "chunk": lambda t: t.chunk(2),
    "index_select": lambda t: t.index_select(0, torch.tensor([1])),
    "gather": lambda t: t.gather(0, torch.tensor([[1]])),
    "diagonal": lambda t: t.diagonal(),
    "t": lambda t: t.t(),
    "permute": lambda t: t.permute(1, 0),
    "matmul": lambda t: t @ t.detach(),
    "linear": lambda t: F.linear(torch.ones(2, t.shape[1]), t),
    "einsum": lambda t: torch.einsum("ij,kj->ik", t, t),
    "numpy": lambda t: t.numpy(),
    "numpy, asarray": np.asarray,
    "tolist": lambda t: t.tolist(),
    "histc": lambda t: torch.histc(t),
    "quantile": lambda t: t.quantile(0.5),
    "median": lambda t: t.median(),
    "topk": lambda t: t.flatten().topk(2),
    "sort": lambda t: t.sort(),
    "argmax": lambda t: t.argmax(),
    "unique": lambda t: t.unique(),
    "nonzero": lambda t: t.nonzero(),
    "std": lambda t: t.std(),
    "var": lambda t: torch.var(t),
    "cumsum": lambda t: t.cumsum(0),
    "softmax": lambda t: t.softmax(-1),
    "norm, rows": lambda t: t.norm(dim=1),
    "mean, rows": lambda t: t.mean(dim=1),
    "sum, columns": lambda t: t.sum(0),
    "max, rows": lambda t: t.max(dim=1),
    "allclose": lambda t: torch.allclose(t, t + 1),
    "renorm": lambda t: torch.renorm(t, 2, 0, 0.4),
    "normalize": lambda t: F.normalize(t, dim=1),
    "linalg_svd": torch.linalg.svd,
    "cat": lambda t: torch.cat([t, t]),
    "stack": lambda t: torch.stack([t, t]),
    "cat, parameters_to_vector": lambda t: nn.utils.parameters_to_vector([t, t]),
    "mul, broadcast": lambda t: t * torch.ones(2, *t.shape),
    "randn_like": torch.randn_like,
    "dropout": lambda t: F.dropout(t, 0.5),
    "data_ptr": lambda t: t.data_ptr(),
    "untyped_storage": lambda t: t.untyped_storage(),
}
WRITES = {
    "__setitem__, row": _set_row,
    "__setitem__, mask": _set_masked,
    "t, written": lambda t: t.t().add_(1.0),
    "__getitem__, written": lambda t: t[1].mul_(2),
    "normal_": lambda t: t.normal_(),
    "uniform_": lambda t: t.uniform_(),
    "bernoulli_": lambda t: t.bernoulli_(0.5),
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "normal_, xavier": nn.init.xavier_normal_,
    "normal_, truncated": nn.init.trunc_normal_,
    "eye, nn.init": nn.init.eye_,
    "masked_scatter_": lambda t: t.masked_scatter_(_like(t) > 0, _like(t)),
    "index_copy_": lambda t: t.index_copy_(0, torch.tensor([1]), torch.ones(1, t.shape[1])),
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([1]), 0.5),
    "scatter_": lambda t: t.scatter_(0, torch.tensor([[1]]), 0.5),
    "put_": lambda t: t.put_(torch.tensor([1]), torch.tensor([0.5])),
    "fill_diagonal_": lambda t: t.fill_diagonal_(3.0),
    "tril_": lambda t: t.tril_(),
    "cumsum_": lambda t: t.cumsum_(0),
    "renorm_": lambda t: t.renorm_(2, 0, 0.4),
    "addmm_": lambda t: t.addmm_(torch.ones(t.shape[0], 2), torch.ones(2, t.shape[1])),
    "add_, too large": lambda t: t.add_(torch.ones(2, *t.shape)),
    "mul, out of another shape": lambda t: torch.mul(torch.ones(2, *t.shape), 2.0, out=t),
    "mm, out": lambda t: torch.mm(torch.ones(6, 6), torch.ones(6, 6), out=t),
    "embedding, largest norm": lambda t: F.embedding(torch.tensor([0, 2]), t, max_norm=0.5),
    "_fused_adam_": _fused_adam,
    "_foreach_max": lambda t: torch._foreach_max([t, t]),
    "apply_": lambda t: t.apply_(abs),
    "map_": lambda t: t.map_(t, max),
    "scale_inplace.default, custom": lambda t: scale_inplace(t, 2.0),
}
SHAPES = {
    "resize_": lambda t: t.resize_(12, 6),
    "t_": lambda t: t.t_(),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "as_strided_": lambda t: t.as_strided_((6,), (1,)),
    "set_, part": lambda t: t.set_(torch.ones(40).untyped_storage(), 0, (6, 6), (6, 1)),
    "set_, nothing": lambda t: t.set_(),
    "untyped_storage, resized": lambda t: t.untyped_storage().resize_(1024),
}
COLLECTIVES = {
    "all_reduce": lambda t: dist.all_reduce(t),
    "broadcast": lambda t: dist.broadcast(t, 0),
    "reduce": lambda t: dist.reduce(t, 0),
    "all_gather": lambda t: dist.all_gather([_like(t), _like(t)], t),
    "all_gather_single": lambda t: dist.all_gather_into_tensor(torch.empty(12, 6), t),
    "scatter": lambda t: dist.scatter(t, [_like(t)] * 2 if dist.get_rank() == 0 else None),
    "reduce_scatter, list": lambda t: dist.reduce_scatter(_like(t), [t, t]),
    "scatter, list": lambda t: dist.scatter(_like(t), [t, t], dist.get_rank()),
    "all_gather, list": lambda t: dist.all_gather([t, _like(t)], _like(t)),
    "gather, list": lambda t: dist.gather(_like(t), [t, t], dist.get_rank()),
    "all_to_all, list": lambda t: dist.all_to_all([t, t], [_like(t), _like(t)]),
    "all_gather_single, output": lambda t: dist.all_gather_into_tensor(t, torch.ones(3, 6)),
    "all_to_all_single, output": lambda t: dist.all_to_all_single(t, _like(t)),
    "all_reduce, functional": lambda t: (
        dist._functional_collectives.all_reduce(t, "sum", dist.group.WORLD) + 0
    ),
}
WITHDRAWN = READS | WRITES | SHAPES | COLLECTIVES
