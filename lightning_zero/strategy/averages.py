"""Lightning's callbacks for weight averaging, with sharded averages.

`WeightAveraging` (and `EMAWeightAveraging`) and `StochasticWeightAveraging` copy the full module in
their `setup`, before the strategy's. From the strategy's set-up to its teardown that copy is a
`Shadow`. The few methods of the callbacks that read its values or the module's run while parameters
of both are views of this rank's shard. The callbacks themselves are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero._lightning.pytorch import Callback, StochasticWeightAveraging, WeightAveraging
from lightning_zero.checkpoint import load_module
from lightning_zero.engine.engine import Engine
from lightning_zero.engine.shadow import Shadow, is_copy
from lightning_zero.layout.stage import State
from lightning_zero.strategy.patches import Patches

__all__ = ["Averages", "check_restorable"]

_AvgFn = Callable[[Tensor, Tensor, Tensor], Tensor]
_MultiAvgFn = Callable[[list[Tensor], list[Tensor], Tensor], None]


class Averages:
    """Averaged modules of a Trainer's callbacks, sharded until `unwrap`.

    Collective: every rank creates it.

    Args:
        engine: Engine that holds the trained module.
        callbacks: All callbacks of the Trainer, after their own `setup`.
        state_dict: Function that returns the checkpoint entries of an averaged module. Its second
            argument names the module's parameters among all entries of a checkpoint.
    """

    def __init__(
        self,
        engine: Engine,
        callbacks: Iterable[Callback],
        state_dict: Callable[[nn.Module, str], dict[str, Any]],
    ) -> None:
        self._engine = engine
        self._state_dict = state_dict
        self._shadows: list[Shadow] = []
        self._patches = Patches()
        try:
            for callback in callbacks:
                if isinstance(callback, WeightAveraging):
                    self._wrap_weight_averaging(callback)
                elif isinstance(callback, StochasticWeightAveraging):
                    self._wrap_stochastic_averaging(callback)
        except BaseException:
            self.restore_methods()
            raise

    def __len__(self) -> int:
        return len(self._shadows)

    def unwrap(self, device: torch.device | None) -> None:
        """Gives the callbacks full averages on `device`; None: without values. Collective."""
        for shadow in self._shadows:
            shadow.unwrap(device)
        self.restore_methods()

    def restore_methods(self) -> None:
        """Restores the callbacks' methods; averages stay sharded. Local."""
        self._shadows = []
        self._patches.undo()

    # ---------------------------------------------------------------- patched methods

    def _wrap_weight_averaging(self, callback: WeightAveraging) -> None:
        average = callback._average_model
        if average is None or not is_copy(average.module, self._engine.module):
            return  # it averages in fit only, and its copy may be of another module
        if not self._can_shard(callback, average.avg_fn, average.multi_avg_fn):
            return
        device = None if callback._device is None else next(average.module.parameters()).device
        shadow = self._wrap_average(average, average.module, device)
        within = self._patches.within
        within(average, "update_parameters", partial(shadow.shard_views, write_back=False))
        for name in ("_swap_models", "_copy_average_to_current"):
            within(callback, name, partial(shadow.shard_views, write_back=True))
        within(callback, "on_load_checkpoint", partial(_loading_shards, self._engine.module))

    def _wrap_stochastic_averaging(self, callback: StochasticWeightAveraging) -> None:
        average = callback._average_model
        if average is None or not self._can_shard(callback, callback._avg_fn, None):
            return
        shadow = self._wrap_average(average, average, None)
        self._patches.within(
            callback, "update_parameters", partial(shadow.shard_views, write_back=False)
        )
        self._patches.within(
            callback, "transfer_weights", partial(shadow.shard_views, write_back=True)
        )

    def _can_shard(
        self, callback: Callback, avg_fn: _AvgFn | None, multi_avg_fn: _MultiAvgFn | None
    ) -> bool:
        if _is_elementwise(avg_fn, multi_avg_fn):
            return True
        if not self._engine.config.states.has_shard(State.OPTIM):
            return False  # full tensors are averaged without a shadow
        raise ValueError(
            f"the averaging function of {type(callback).__name__} is not elementwise, so it cannot "
            "average shards; use an elementwise one, or ZeroStrategy(stage=0), where nothing is "
            "sharded."
        )

    def _wrap_average(
        self, average: nn.Module, copy: nn.Module, device: torch.device | None
    ) -> Shadow:
        """Creates a shadow of `copy`, which is `average` or its submodule."""
        _check_copy(copy)
        shadow = Shadow(self._engine, copy, device=device)
        kind = f"average {len(self._shadows)} of parameter"
        self._shadows.append(shadow)
        save = _unless_nested(average, "state_dict", lambda one: self._state_dict(one, kind))
        self._patches.within(average, "to", shadow.own_views)
        self._patches.put(average, "state_dict", save)
        self._patches.put(average, "load_state_dict", _loader(average))
        return shadow


def check_restorable(checkpoint: Mapping[str, Any]) -> None:
    """Raises if averages would be restored into parameters on the meta device.

    The callbacks load them before the strategy's set-up, so that the values would be lost.
    """
    states = checkpoint.get("callbacks", {}).values()
    is_stochastic = any(isinstance(s, Mapping) and s.get("average_model_state") for s in states)
    if is_stochastic or "averaging_state" in checkpoint:
        raise ValueError(
            "the checkpoint holds averages of weights, which their callback cannot restore into "
            "parameters on the meta device; materialize the module before fit "
            "(module.to_empty(device=...))."
        )


def _unless_nested(module: nn.Module, name: str, function: Callable[..., Any]) -> Any:
    """A method that calls `function(module)`, and the original method if called from inside."""

    def run(*args: Any, **kwargs: Any) -> Any:
        own = vars(module).pop(name)
        try:
            return function(module, *args, **kwargs)
        finally:
            vars(module)[name] = own

    return run


def _loader(module: nn.Module) -> Any:
    """A `load_state_dict` that loads this rank's shard."""

    def load(module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        return load_module(module, state_dict, strict=strict)

    return _unless_nested(module, "load_state_dict", load)


@contextmanager
def _loading_shards(module: nn.Module) -> Iterator[None]:
    """Makes `module.load_state_dict` work after set-up, for the learning rate finder."""
    patches = Patches()
    patches.put(module, "load_state_dict", _loader(module))
    try:
        yield
    finally:
        patches.undo()


def _check_copy(copy: nn.Module) -> None:
    """Raises if the callback's copy cannot be averaged or saved."""
    for name, tensor in [*copy.named_parameters(), *copy.named_buffers()]:
        if tensor.is_meta:
            raise ValueError(
                f"{name} was on the meta device when its average was set up, so the average has no "
                "values; build the module with values, or leave out the averaging callback."
            )
        if "_orig_mod." in name:
            raise ValueError(
                f"{name} belongs to a submodule that torch.compile(...) has wrapped, whose average "
                "could not be loaded again; compile it in place with `.compile()`."
            )


def _is_elementwise(avg_fn: _AvgFn | None, multi_avg_fn: _MultiAvgFn | None) -> bool:
    """Whether averaging two small tensors equals averaging their parts."""
    if avg_fn is None and multi_avg_fn is None:
        return True  # torch's default
    generator = torch.Generator().manual_seed(0)
    average, current = torch.randn(2, 4, 6, generator=generator)

    def averaged(value: Tensor, other: Tensor) -> Tensor:
        value, number = value.clone(), torch.tensor(3)
        if multi_avg_fn is not None:
            multi_avg_fn([value], [other.clone()], number)
            return value
        assert avg_fn is not None
        return avg_fn(value, other.clone(), number)

    with torch.no_grad():
        full = averaged(average, current).reshape(-1)
        parts = zip(average.view(-1).split(11), current.view(-1).split(11), strict=True)
        return torch.allclose(full, torch.cat([averaged(value, other) for value, other in parts]))
