"""Data flow of an optimizer step: finds the elements on which each element depends.

[Note: Labels] Every element of every tensor has a label: 0 if it depends on no parameter, gradient
or state; else the label of one element of one owner, of several elements of one owner, or of
several owners. An *owner* is a parameter with its gradient and its states. Labels of operands are
united: equal labels stay, different elements of one owner become "several elements of it", and
different owners become `GLOBAL`. Random numbers, and all values computed from them, are `RANDOM`.

Labels are stored per storage, not per tensor, so views and in-place operations need no rules of
their own. Each operation is classified: it works element by element, moves elements, or creates
values. Any other operation unites the labels of all inputs in all outputs. The labels do not depend
on values, so the result holds for all values.

[Note: Numbers] When Python reads a number (`item()`, `bool(tensor)`), its further use is not
visible in tensors. Its owner is recorded, and `alter` may replace the number, so that a second run
shows which parameters depend on it. Values that leave torch (`numpy()`) make the step untraceable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lightning_zero.tensors.composite import plain_tensors

__all__ = ["GLOBAL", "RANDOM", "Flow", "element_labels", "owner_of", "united"]

_SHIFT = 40
_SEVERAL = (1 << _SHIFT) - 1  # in place of an element number: several elements of the owner
GLOBAL = 1 << 62
RANDOM = GLOBAL + 1

_NEW = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros"),
    *("new_ones", "new_full", "new_empty_strided", "zero_", "fill_.Scalar", "fill.Scalar"),
    *("_foreach_zero", "_foreach_zero_"),
}  # operations whose results depend on no operand
_BY_ELEMENT = {
    *("clone", "_to_copy", "copy_", "copy", "fill_.Tensor", "fill.Tensor", "complex", "polar"),
    *("masked_fill_", "lerp_", "_conj_physical", "clip_", "where", "threshold", "threshold_"),
}  # elementwise operations that torch does not tag
# Operations that overwrite their first operand without reading it.
_OVERWRITING = {"copy_", "copy", "_foreach_copy_", "_foreach_copy"}
_MOVING = {
    *("cat", "stack", "flip", "roll", "repeat", "tril", "triu", "diag_embed", "_unsafe_view"),
    *("select_scatter", "slice_scatter", "diagonal_scatter", "unfold_copy", "select_copy"),
    *("slice_copy", "transpose_copy", "permute_copy", "view_copy", "narrow_copy", "split_copy"),
}
# Operations on lists that return one number for each tensor.
_OF_EACH_TENSOR = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}
_READING = {"numpy", "__array__", "__dlpack__"}
_MAX_NUM_READ = 100_000
_NUM_OPS_PER_PURGE = 64


def element_labels(owner: int, like: Tensor) -> Tensor:
    """Labels of the elements of `owner`, int64, of the shape of `like`."""
    numbers = torch.arange(like.numel(), device=like.device)
    return numbers.add_((owner + 1) << _SHIFT).view(like.shape)


def owner_of(label: int) -> int | None:
    """Owner in a label; None for `GLOBAL` and `RANDOM`."""
    return None if label >= GLOBAL else (label >> _SHIFT) - 1


def united(labels: Tensor | None) -> int:
    """Unites labels to one label."""
    if labels is None or not labels.numel():
        return 0
    lowest, highest = (int(label) for label in labels.aminmax())
    if lowest == 0 and highest != 0:
        lowest = int(labels[labels != 0].min())
    if lowest == highest or highest >= GLOBAL:
        return highest
    return highest | _SEVERAL if lowest >> _SHIFT == highest >> _SHIFT else GLOBAL


def _unite(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Unites two tensors of labels element by element, with broadcasting. None: all are 0."""
    if one is None or other is None:
        return other if one is None else one
    if one.shape == other.shape and torch.equal(one, other):
        return one
    is_one_owner = (one >> _SHIFT) == (other >> _SHIFT)
    several = torch.where(is_one_owner, one | _SEVERAL, torch.maximum(one, other).clamp(min=GLOBAL))
    several = torch.where(one == 0, other, torch.where(other == 0, one, several))
    return torch.where(one == other, one, several)


@dataclass
class _Labels:
    """Labels of one storage.

    Attributes:
        itemsize: Bytes that one label stands for.
        values: Labels, 1-D, int64; None: all are 0.
        is_written: Whether an operation has written the storage.
    """

    itemsize: int = 1
    values: Tensor | None = None
    is_written: bool = False

    def of(self, tensor: Tensor) -> Tensor | None:
        """Labels of the elements of `tensor`, of its shape; a view if the item sizes are equal."""
        if self.values is None:
            return None
        self._fit(tensor)
        parts = tensor.itemsize // self.itemsize
        view = self._view(tensor, parts)
        labels: Tensor | None = view[..., 0]
        for part in range(1, parts):
            labels = _unite(labels, view[..., part])
        return labels

    def put(self, tensor: Tensor, labels: Tensor | int | None, *, is_written: bool = False) -> None:
        """Sets the labels of the elements of `tensor`; see `Flow.put`."""
        self.is_written |= is_written
        if self.values is None:
            if labels is None:
                return
            self.itemsize = tensor.itemsize
            numel = tensor.untyped_storage().nbytes() // tensor.itemsize
            self.values = torch.zeros(numel, dtype=torch.int64, device=tensor.device)
        self._fit(tensor)
        parts = tensor.itemsize // self.itemsize
        view = self._view(tensor, parts)
        if isinstance(labels, Tensor):
            labels = labels.clone() if parts > 1 else labels  # it may alias `view`
            view.copy_(labels.unsqueeze(-1))
        else:
            view.fill_(labels or 0)

    def _fit(self, tensor: Tensor) -> None:
        """Adapts `values` to a storage that has grown, or to a view with smaller items.

        Each smaller item gets the label of the larger item that contains it.
        """
        assert self.values is not None
        if tensor.itemsize < self.itemsize:
            self.values = self.values.repeat_interleave(self.itemsize // tensor.itemsize)
            self.itemsize = tensor.itemsize
        missing = tensor.untyped_storage().nbytes() // self.itemsize - self.values.numel()
        if missing > 0:
            self.values = torch.cat([self.values, self.values.new_zeros(missing)])

    def _view(self, tensor: Tensor, parts: int) -> Tensor:
        assert self.values is not None
        strides = [stride * parts for stride in tensor.stride()]
        start = tensor.storage_offset() * parts
        return self.values.as_strided([*tensor.shape, parts], [*strides, 1], start)


class Flow(TorchDispatchMode):
    """Mode that propagates labels through all operations. See [Note: Labels].

    Args:
        alter: Called with the label of each number that Python reads, the number, and the count of
            `__enter__` calls; returns the number that Python gets. See [Note: Numbers].

    Attributes:
        owners_read: Owners of numbers that Python has read; None stands for several owners.
        untraceable: Name of the call that took values out of torch, for errors; None: no such call.
    """

    def __init__(self, alter: Callable[[int, Any, int], Any] | None = None) -> None:
        super().__init__()
        self.owners_read: set[int | None] = set()
        self.untraceable: str | None = None
        self._alter = alter
        self._known: dict[StorageWeakRef, _Labels] = {}  # by storage; dead ones are purged
        self._num_ops = self._num_read = self._num_entered = 0
        self._exits: _ExitDetector | None = None  # only while entered: they refer to each other
        self._is_paused = False

    def __enter__(self) -> Flow:
        self._num_entered += 1
        self._exits = _ExitDetector(self)
        self._exits.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        exits, self._exits = self._exits, None
        assert exits is not None
        exits.__exit__(*error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Does not trace inside: for comparisons of the probe, which are not the optimizer's."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    # ---------------------------------------------------------------- labels

    def mark(self, tensor: Tensor, owner: int) -> None:
        """Labels the elements of `tensor` as those of `owner`."""
        known = self._known.setdefault(StorageWeakRef(tensor.untyped_storage()), _Labels())
        known.put(tensor, element_labels(owner, tensor))

    def labels_of(self, tensor: Tensor) -> Tensor | None:
        """Labels of `tensor`, of its shape; None: all are 0."""
        known = self._known.get(StorageWeakRef(tensor.untyped_storage()))
        return None if known is None else known.of(tensor)

    def is_written(self, tensor: Tensor) -> bool:
        """Whether an operation in this mode has written the memory of `tensor`."""
        known = self._known.get(StorageWeakRef(tensor.untyped_storage()))
        return known is not None and known.is_written

    def has_labels(self, tree: Any) -> bool:
        """Whether the tensors of `tree` may depend on an owner."""
        known = (self._known.get(StorageWeakRef(t.untyped_storage())) for t in _tensors(tree))
        return any(labels is not None and labels.values is not None for labels in known)

    def label_of(self, tree: Any) -> int:
        """United label of all tensors in `tree`."""
        labels = [united(self.labels_of(tensor)) for tensor in plain_tensors(tree)]
        return united(torch.tensor(labels, dtype=torch.int64))

    def put(self, tensor: Tensor, labels: Tensor | int | None) -> None:
        """Sets the labels of the elements of `tensor`: of its shape, or one for all; None: 0."""
        known = self._known.setdefault(StorageWeakRef(tensor.untyped_storage()), _Labels())
        known.put(tensor, labels, is_written=True)

    def note_untraceable(self, call: str) -> None:
        """Notes that `call` took values out of torch; the first such call counts."""
        self.untraceable = self.untraceable or call

    # ---------------------------------------------------------------- operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the operations of its inner tensors arrive here
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        self._num_ops += 1
        if self._num_ops % _NUM_OPS_PER_PURGE == 0:
            self._known = {r: labels for r, labels in self._known.items() if not r.expired()}
        if func.is_view or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        return _Operation(self, func, args, kwargs).run()

    def read(self, label: int, number: Any) -> Any:
        """Records that Python reads `number`, and returns the number that Python gets."""
        if not label:
            return number
        self.owners_read.add(owner_of(label))
        self._num_read += 1
        if self._num_read > _MAX_NUM_READ:
            raise RuntimeError("the step reads an unbounded count of numbers")
        return number if self._alter is None else self._alter(label, number, self._num_entered)


class _Rule(Enum):
    """Rule by which the labels of outputs follow from the labels of inputs."""

    NEW = "no labels"
    RANDOM = "random"
    OF_LISTS = "labels at the same index of all lists"
    OF_FUSED = "labels at the same index of all lists, in a fused step"
    BY_ELEMENT = "element by element"
    MOVED = "labels move with the elements"
    ALL = "each output element depends on all inputs"


@dataclass(frozen=True)
class _Signature:
    """Properties of an operator.

    Attributes:
        rule: Rule for labels.
        is_set_masked: Whether it is `tensor[...] = values`.
        names: Names of its arguments.
        written: Names of the arguments that it writes.
        not_read: Names of the arguments that it only writes.
    """

    rule: _Rule
    is_set_masked: bool
    names: tuple[str, ...]
    written: frozenset[str]
    not_read: frozenset[str]

    @staticmethod
    @cache
    def of(func: Any) -> _Signature:
        """Signature of an operator of torch or of a library."""
        arguments = func._schema.arguments
        name = str(func.overloadpacket.__name__)
        names = {name, f"{name}.{func._overloadname}"}
        written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        not_read = {a.name for a in arguments if a.is_out}
        if not names.isdisjoint(_OVERWRITING):
            not_read.add(arguments[0].name)
        return _Signature(
            _rule_of(func, name, names, has_written=bool(written)),
            name in ("index_put", "index_put_"),
            tuple(a.name for a in arguments),
            frozenset(written),
            frozenset(not_read),
        )


def _rule_of(func: Any, name: str, names: set[str], *, has_written: bool) -> _Rule:
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _Rule.RANDOM
    if not names.isdisjoint(_NEW):
        return _Rule.NEW
    if name.startswith("_foreach_"):
        return _Rule.OF_LISTS
    if name.startswith("_fused_"):
        return _Rule.OF_FUSED
    if torch.Tag.data_dependent_output in func.tags:  # equal() is tagged as pointwise
        return _Rule.ALL
    if torch.Tag.pointwise in func.tags or not names.isdisjoint(_BY_ELEMENT):
        return _Rule.BY_ELEMENT
    return _Rule.MOVED if name in _MOVING and not has_written else _Rule.ALL


class _Operation:
    """One call of an operator: runs it, and labels its outputs."""

    def __init__(self, flow: Flow, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        self._flow = flow
        self._func = func
        self._args = args
        self._kwargs = kwargs
        self._signature = signature = _Signature.of(func)
        self._given: dict[str, Any] = dict(zip(signature.names, args, strict=False)) | kwargs
        self._written = [self._given[name] for name in signature.written if name in self._given]
        self._read = {
            name: value
            for name, value in self._given.items()
            if name not in signature.not_read and _tensors(value)
        }

    def run(self) -> Any:
        flow = self._flow
        labels = self._labels()  # before the call, which may write its inputs
        before = self._values_of_library_outputs()
        results = self._func(*self._args, **self._kwargs)
        written = _tensors(self._written) or _tensors(results)
        if before:  # an operator of a library may declare more outputs than it writes
            pairs = zip(written, before, strict=True)
            written = [t for t, old in pairs if not torch.equal(t.detach(), old)]
        per_tensor = labels if isinstance(labels, list) else [labels] * len(written)
        for tensor, own in zip(written, per_tensor, strict=True):
            flow.put(tensor, own.expand(tensor.shape) if isinstance(own, Tensor) else own)
        if not written and isinstance(results, (bool, int, float, complex)):
            return flow.read(flow.label_of(list(self._read.values())), results)
        return results

    def _values_of_library_outputs(self) -> list[Tensor]:
        """Copies of tensors that a library's operator may write; empty for operators of torch."""
        if self._func.namespace == "aten":
            return []
        return [tensor.detach().clone() for tensor in _tensors(self._written)]

    def _labels(self) -> Tensor | int | list[Tensor | None] | None:
        """Labels of the outputs: one entry per tensor, or one for all tensors."""
        rule, operands = self._signature.rule, list(self._read.values())
        if rule is _Rule.RANDOM:
            return RANDOM
        if rule is _Rule.NEW or not self._flow.has_labels(operands):
            return None
        if rule in (_Rule.OF_LISTS, _Rule.OF_FUSED):
            return self._of_lists(operands)
        if rule is _Rule.BY_ELEMENT or (self._signature.is_set_masked and self._is_masked()):
            labels = None
            for tensor in _tensors(operands):
                labels = _unite(labels, self._flow.labels_of(tensor))
            return labels
        if rule is _Rule.MOVED:
            moved = self._func(*self._moved(self._args), **self._moved(self._kwargs))
            return [moved] if isinstance(moved, Tensor) else list(moved)
        return self._flow.label_of(operands) or None

    def _is_masked(self) -> bool:
        """Whether the call is `tensor[mask] = number` with a mask of the tensor's shape."""
        target, indices, values = (self._given[name] for name in ("self", "indices", "values"))
        mask = indices[0] if len(indices) == 1 else None
        if mask is None or mask.dtype is not torch.bool:
            return False
        return bool(mask.shape == target.shape and values.dim() == 0)

    def _of_lists(self, operands: list[Any]) -> list[Tensor | None]:
        """Labels of the tensors in all written lists, or in the returned one.

        All lists have equal lengths; a fused step ignores empty ones.
        """
        steps = self._read.get("state_steps")
        others = [operand for operand in operands if operand is not steps]
        num = max(len(operand) for operand in others if not isinstance(operand, Tensor))
        is_each = self._func.overloadpacket.__name__ in _OF_EACH_TENSOR
        labels: list[Tensor | None] = []
        for written in self._written or [range(num)]:
            own = [steps] if written is steps else others
            labels += [self._of_one(own, index, is_each=is_each) for index in range(len(written))]
        return labels

    def _of_one(self, operands: list[Any], index: int, *, is_each: bool) -> Tensor | None:
        """United labels of the tensors at `index` of all lists, and of single tensors."""
        labels = None
        for operand in operands:
            is_list = isinstance(operand, (list, tuple))
            tensor = operand[index] if is_list else operand
            own = self._flow.labels_of(tensor)
            if own is not None and (is_each or (not is_list and tensor.numel() > 1)):
                own = torch.full((), united(own), dtype=torch.int64, device=own.device)
            labels = _unite(labels, own)
        return labels

    def _moved(self, values: Any) -> Any:
        """Operands with tensors replaced by their labels."""

        def labels_of(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            labels = self._flow.labels_of(value)
            empty = torch.zeros(value.shape, dtype=torch.int64, device=value.device)
            return empty if labels is None else labels

        return tree_map(labels_of, values)


class _ExitDetector(TorchFunctionMode):
    """Detects calls that take values out of torch without an operator."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "tolist":
            return _nested(args[0])
        if name in _READING and self._flow.label_of(args[0]):
            self._flow.note_untraceable(f"Tensor.{name}()")
        return func(*args, **(kwargs or {}))


def _nested(tensor: Tensor) -> Any:
    return [_nested(row) for row in tensor.unbind()] if tensor.dim() else tensor.item()


def _tensors(tree: Any) -> list[Tensor]:
    """All tensors in nested lists and tuples."""
    if isinstance(tree, Tensor):
        return [tree]
    if not isinstance(tree, (list, tuple)):
        return []
    return [tensor for part in tree for tensor in _tensors(part)]
