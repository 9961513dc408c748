"""The callback `NonfiniteTrace`: computes a micro-batch again to find the origin of a NaN.

[Note: A copy computes it] The guard names the parameter whose gradient is not finite, not the
module where that began. When it reports, the rank that has found it copies the full module, and
computes its micro-batch again with the same random numbers, with a look at each module's values.
The engine takes part only with the all-gathers of that copy, so training goes on bit by bit as
without the callback. The parameters must be those of the micro-batch: a report that comes after the
step, as on a GPU with `on_nonfinite="warn"`, is not computed again.

Alternatives considered: the engine's own module in a second forward and backward. It needs less
memory, but every rank must run it, and gradients, partial means and buffers must be put aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from typing_extensions import override

from lightning_zero._lightning import pytorch as pl
from lightning_zero._lightning.pytorch import rank_zero_warn
from lightning_zero.checkpoint.rank_states import random_state
from lightning_zero.checkpoint.remote import is_remote
from lightning_zero.core.guard import NonfiniteReport
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.names import parameters_by_name, saved_name
from lightning_zero.observe.first_nonfinite import FirstNonfinite, Origin, nonfinite_kinds
from lightning_zero.observe.replica import (
    SILENT,
    allocated,
    cast,
    copy_of,
    copy_values,
    own_random_numbers,
)
from lightning_zero.observe.report import zero_strategy
from lightning_zero.strategy.strategy import ZeroStrategy

__all__ = ["NonfiniteTrace"]

_FOLDER = "nonfinite"
_CPU = torch.device("cpu")
_CHANGED = (
    "the parameters have changed since: a report on a GPU comes after the step with "
    'on_nonfinite="warn"; use "stop" or "skip"'
)


@dataclass
class _MicroBatch:
    """What a micro-batch was computed from."""

    arguments: tuple[Any, ...]  # of `training_step`
    rng: dict[str, Any]


class NonfiniteTrace(pl.Callback):
    """Names the module in which a NaN or an infinity begins, where a gradient is not finite.

    When the guard (`on_nonfinite`) reports a gradient, the rank that has found it computes the
    micro-batch again on a full copy of the module, and looks at the output of each module and at
    the gradients of its inputs and parameters. A warning on rank 0 names the first module that
    makes finite values non-finite, and a file with batch, random state, step and parameters.
    `NonfiniteTrace.reproduce` computes it once more from that file, on one process. With
    `on_nonfinite="stop"` this happens before the error. Training is not changed.

    The copy needs the memory of full parameters and gradients on that rank, on the device or, if
    they do not fit, in CPU memory, where it computes then. Until the end of a step, the batches of
    its micro-batches are kept.

    On a GPU, use it with `on_nonfinite="stop"` or "skip". With "warn" the report comes after the
    step, when the parameters have changed; then only the file is written, without parameters.

    Collective: every rank, at each report.

    Args:
        dirpath: str or None. Directory for the files, by default `nonfinite` in the Trainer's
            `log_dir` or `default_root_dir`.
        max_traces: int, default 1. Reports of a fit that are traced.
        saves_parameters: bool, default True. Whether the file has all parameters and buffers.

    Attributes:
        last_trace: str or None. Text of the last trace, the same on every rank.

    Raises:
        TypeError: The strategy is not a `ZeroStrategy`.
        ValueError: An argument is out of range; or the guard is off; or the module uses manual
            optimization.
    """

    def __init__(
        self, dirpath: str | None = None, *, max_traces: int = 1, saves_parameters: bool = True
    ) -> None:
        if isinstance(max_traces, bool) or not isinstance(max_traces, int) or max_traces < 1:
            raise ValueError(f"max_traces must be an integer of at least 1, got {max_traces!r}.")
        self.dirpath = dirpath
        self.max_traces = max_traces
        self.saves_parameters = saves_parameters
        self.last_trace: str | None = None
        # While training:
        self._trainer: pl.Trainer | None = None
        self._copy: pl.LightningModule | str = ""  # on the meta device; or why there is none
        self._folder = Path(_FOLDER)
        self._num_traces = 0
        self._micro_batches: dict[int, _MicroBatch] = {}  # by the number of their backward

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy = zero_strategy(trainer, self)
        if stage != "fit":
            return
        if strategy.config.on_nonfinite is None:
            raise ValueError(
                "NonfiniteTrace needs the reports of the guard, got on_nonfinite=None; use "
                'on_nonfinite="stop" or "skip", or "warn" on CPUs.'
            )
        if not pl_module.automatic_optimization:
            raise ValueError(
                "NonfiniteTrace needs automatic optimization: it computes training_step again, "
                "which steps the optimizers in manual optimization; remove NonfiniteTrace."
            )
        self._trainer, self._num_traces = trainer, 0
        try:
            self._copy = copy_of(pl_module, on_meta=True)
        except Exception as error:
            self._copy = f"the module cannot be copied: {type(error).__name__}: {error}"
            rank_zero_warn(f"NonfiniteTrace can write files only: {self._copy}")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        run = trainer.log_dir or trainer.default_root_dir  # collective
        self._folder = Path(self.dirpath or Path("." if is_remote(run) else run, _FOLDER))
        strategy = zero_strategy(trainer, self)
        strategy.engine.guard.add_listener(self._on_report)
        strategy.before_training_step.append(partial(self._note, strategy.engine))

    def _note(self, engine: Engine, *args: Any) -> None:
        """Notes from what the next backward is computed."""
        guard = engine.guard
        containers = tree_map(lambda one: one, args)  # training_step may take values out of them
        kept = {n: one for n, one in self._micro_batches.items() if n >= guard.oldest_backward}
        kept[guard.num_backwards] = _MicroBatch(containers, random_state(engine.device))
        self._micro_batches = kept

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._trainer, self._copy = None, ""
        self._micro_batches = {}

    # ---------------------------------------------------------------- a report

    def _on_report(self, report: NonfiniteReport) -> None:
        """Traces the first gradient of a report. Collective."""
        if self._trainer is None or self._num_traces >= self.max_traces:
            return
        self._num_traces += 1
        first, strategy = report.found[0], zero_strategy(self._trainer, self)
        engine = strategy.engine
        is_here = first.rank == engine.comm.rank
        made: pl.LightningModule | str | None = None
        if report.is_current:
            made = self._copy_here(strategy) if is_here else None
            copy_values(engine, made if isinstance(made, nn.Module) else None)
        made = _CHANGED if made is None else made
        own = self._trace(strategy, report, made) if is_here else None
        self.last_trace = engine.comm.control.gather_objects(own)[first.rank]
        rank_zero_warn(
            f"trace of {first.parameter} on rank {first.rank}, step {first.step}, micro-batch "
            f"{first.micro_batch}:\n  {self.last_trace}"
        )

    def _copy_here(self, strategy: ZeroStrategy) -> pl.LightningModule | str:
        """A copy with memory, on the device if it fits there; or why there is none. Local."""
        if isinstance(self._copy, str):
            return self._copy
        engine = strategy.engine
        plans = [bucket.plan for bucket in engine.buckets]
        num_bytes = 2 * sum(plan.layout.numel * plan.dtype.itemsize for plan in plans)  # and grads
        device = engine.device if _fits(engine.device, num_bytes) else _CPU
        try:
            made = allocated(self._copy, engine.module, device)
            slots = (slot for plan in plans for slot in plan.layout.slots)
            if missing := {slot.name for slot in slots} - parameters_by_name(made).keys():
                raise KeyError(*missing)
        except Exception as error:  # on this rank alone: the others must not wait
            return f"the module cannot be copied: {type(error).__name__}: {error}"
        return made

    def _trace(
        self, strategy: ZeroStrategy, report: NonfiniteReport, module: pl.LightningModule | str
    ) -> str:
        """Writes the file and computes the micro-batch again. Local; returns a text.

        `module`: the copy; or why there is none.
        """
        assert self._trainer is not None
        first = report.found[0]
        number = strategy.engine.guard.num_backwards - 1 - report.age
        micro_batch = self._micro_batches.get(number)
        if micro_batch is None:
            return "its batch is not known any more"
        plugin = strategy.precision_plugin
        state = {
            "global_step": self._trainer.global_step,
            **vars(first),
            "arguments": _to(micro_batch.arguments, _CPU),
            "rng": micro_batch.rng,
            "precision": plugin.precision,
            "scale": _scale_of(plugin)
            * strategy.batch_group.size
            / self._trainer.accumulate_grad_batches,
        }
        if self.saves_parameters and isinstance(module, nn.Module):
            state["values"] = {
                name: value.detach().to(_CPU) for name, value in _values_of(module).items()
            }
        file = self._write(state, f"step-{first.step}-rank-{first.rank}.pt")
        text = module
        if isinstance(module, nn.Module):
            with strategy.refusing_collectives(_refuse_collective), _WithoutCollectives():
                text = _again(module, state, plugin.train_step_context)
        return f"{text}\n  {file}"

    def _write(self, state: dict[str, Any], name: str) -> str:
        path = self._folder / name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            torch.save(state, path)
        except Exception as error:
            with suppress(OSError):
                path.unlink()  # what `torch.save` has written of it
            return f"its file was not written: {type(error).__name__}: {error}"
        return f"to compute it again: NonfiniteTrace.reproduce({str(path)!r}, module)"

    # ---------------------------------------------------------------- on one process

    @staticmethod
    def reproduce(path: str, module: pl.LightningModule) -> str:
        """Computes the micro-batch of a file again, on this process and the module's device.

        Nothing is logged. If `training_step` uses `self.trainer`, set `module.trainer` to a Trainer
        of one device first.

        Args:
            path: File that a warning has named.
            module: The module, built as in the run. Its parameters and buffers get the dtypes and
                values of the file, and its gradients are dropped.

        Returns:
            The text of the trace.

        Raises:
            pickle.UnpicklingError: The batch has classes that torch does not load; see
                `torch.serialization.add_safe_globals`.
            KeyError: The module has other parameters or buffers than the file.
        """
        state = torch.load(path, map_location="cpu", weights_only=True)
        values: dict[str, Tensor] = state.get("values", {})
        cast(module, {name: value.dtype for name, value in values.items()})
        own = _values_of(module)
        with torch.no_grad():
            for name, value in values.items():
                own[name].copy_(value)
        precision, device = str(state["precision"]), module.device
        dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)

        def context() -> AbstractContextManager[Any]:
            return nullcontext() if dtype is None else torch.autocast(device.type, dtype)

        with _silent(module):
            return _again(module, state, context)


class _WithoutCollectives(TorchDispatchMode):
    """Mode in which torch's collectives raise an error: no other rank takes part in them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if "c10d" in func.namespace:
            _refuse_collective(str(func))
        return func(*args, **(kwargs or {}))


def _refuse_collective(name: str) -> NoReturn:
    raise RuntimeError(
        f"training_step communicates between ranks ({name}), and this rank computes it alone"
    )


@contextmanager
def _silent(module: pl.LightningModule) -> Iterator[None]:
    """Context in which the module logs nothing."""
    module.__dict__.update(SILENT)
    try:
        yield
    finally:
        for name in SILENT:
            del module.__dict__[name]


def _again(
    module: pl.LightningModule,
    state: Mapping[str, Any],
    context: Callable[[], AbstractContextManager[Any]],
) -> str:
    """Computes a micro-batch again and describes its first non-finite value."""
    try:
        try:
            origin = _origin_of(module, state, context)
        except torch.OutOfMemoryError:
            module.zero_grad()
            origin = _origin_of(module.to(_CPU), state, context)
    except Exception as error:
        return f"it could not be computed again: {type(error).__name__}: {error}"
    finally:
        module.zero_grad()
    if origin is None:
        return "computed again, all of its values are finite"
    return str(origin)


def _origin_of(
    module: pl.LightningModule,
    state: Mapping[str, Any],
    context: Callable[[], AbstractContextManager[Any]],
) -> Origin | None:
    device = next(module.parameters()).device
    arguments = _to(state["arguments"], device)
    if nonfinite_kinds(arguments) - {"-infinity"}:  # which masks have
        return Origin("forward", None, "the batch is not finite")
    look = FirstNonfinite(module)
    eager = torch.compiler.set_stance("force_eager")  # compiled modules run no hooks of theirs
    with own_random_numbers(device, state["rng"]), torch.enable_grad(), eager, look.watching():
        with context():
            output = module.training_step(*arguments)
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is not None:
            loss = loss * state["scale"]
            look.look_at_loss(loss)
            loss.backward()
    return look.origin


def _values_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers, by their names without compilation."""
    buffers = {saved_name(name): buffer for name, buffer in module.named_buffers()}
    return {**parameters_by_name(module), **buffers}


def _to(tree: Any, device: torch.device) -> Any:
    return tree_map(lambda one: one.to(device) if isinstance(one, Tensor) else one, tree)


def _fits(device: torch.device, num_bytes: int) -> bool:
    """Whether `num_bytes` are free on the device; the CPU always counts as free."""
    return device.type != "cuda" or torch.cuda.mem_get_info(device)[0] > num_bytes


def _scale_of(plugin: Any) -> float:
    """Scale of the loss; 1 without a loss scaler."""
    scaler = getattr(plugin, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())
