"""Faults of the engine's use of streams, events and buffers, each in one function.

`test_seeded_faults.py` trains the scenario of a fault with that function replaced: the clocks, or
the limits of the scenario, must find it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lightning_zero import activations
from lightning_zero.comm.backends import DeviceBackend, _AsyncCollective
from lightning_zero.core.gradients import Gradients
from lightning_zero.core.step_worker import StepLoop, StepWorker
from lightning_zero.core.unit import Prefetcher
from lightning_zero.optim.chunks import ChunkStep
from lightning_zero.record import streams
from lightning_zero.tiers import storage
from lightning_zero.tiers.grad_offload import OffloadedGrad
from lightning_zero.tiers.memory import BufferPool
from lightning_zero.tiers.nvme import Transfer
from lightning_zero.tiers.pipeline import _Slot

__all__ = ["FAULTS", "Fault", "seed"]


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        owner: Class or module whose function is replaced.
        function: Name of that function.
        make: Makes the function with the fault from the one without.
        scenario: Name of a scenario in which it is found.
        kind: Kind of what is found then, see `complaints`.
    """

    owner: Any
    function: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    scenario: str
    kind: str


def seed(name: str) -> None:
    """Replaces the function of a fault in this process; "" is none."""
    if name:
        fault = FAULTS[name]
        right = vars(fault.owner)[fault.function]
        setattr(fault.owner, fault.function, fault.make(right))


def _nothing(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: None


def _after(change: Callable[[Any], object]) -> Callable[..., Any]:
    """Calls `change` with the object after the method."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = right(self, *args, **kwargs)
            change(self)
            return result

        return wrong

    return make


def _before(change: Callable[[Any], object]) -> Callable[..., Any]:
    """Calls `change` with the object before the method."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
            change(self)
            return right(self, *args, **kwargs)

        return wrong

    return make


def _without_wait(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, stream, after=None: streams.on(stream)


def _unpinned(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda nbytes, *, pin: right(nbytes, pin=False)


def _forgets_arrival(grad: OffloadedGrad) -> None:
    if grad._pending is not None:
        grad._pending = dataclasses.replace(grad._pending, event=None)


def _forgets_average(grads: Gradients) -> None:
    if grads._reduction is not None:
        grads._reduction = dataclasses.replace(grads._reduction, pending=_AsyncCollective([]))


def _frees_source(grad: OffloadedGrad) -> None:
    assert grad._pending is not None
    grad._pending = dataclasses.replace(grad._pending, source=grad._pending.values)


def _ignores_compute(uploader: storage._Uploader) -> None:
    uploader._stream.wait_stream = lambda other: None  # type: ignore[method-assign]


def _set(name: str) -> Callable[[Any], object]:
    return lambda self: setattr(self, name, None)


_S3, _RATE = "stage 3, device, fp32, plain", "stage 3, device, fp32, tensor rate"
_CPU, _NVME = "stage 3, cpu optimizer, fp32, plain", "stage 3, nvme parameters, fp32, plain"

FAULTS = {
    # ------------------------------------------------------------------ collectives
    "no side stream waits for compute": Fault(
        DeviceBackend, "_side_stream", _without_wait, _S3, "RACE"
    ),
    "compute does not wait for a collective": Fault(
        _AsyncCollective, "wait", _nothing, _S3, "RACE"
    ),
    "the host does not wait for uploads before it writes to their memory": Fault(
        DeviceBackend, "wait_for_uploads", _nothing, "stage 3, cpu both, fp32, evaluation", "RACE"
    ),
    "compute does not wait until gradients have been looked at": Fault(
        *(DeviceBackend, "wait_for_reductions", _nothing),
        *("stage 1, device, fp32, accumulate", "RACE"),
    ),
    "a run begins while collectives of the last one use their memory": Fault(
        DeviceBackend, "wait_for_all", _nothing, "stage 3, device, fp32, failures in groups", "FREE"
    ),
    "a loss scaler's copies are not waited for": Fault(
        *(streams, "wait_for_current", _nothing),
        *("stage 3, cpu optimizer, fp16, clip", "RACE"),
    ),
    "nothing is prefetched": Fault(Prefetcher, "prefetch", _nothing, _S3, "OVERLAP"),
    "a gradient is used before it has been averaged over replicas": Fault(
        *(Gradients, "end_group_reduction", _after(_forgets_average)),
        *("stage 1, device, bf16, groups", "RACE"),
    ),
    # ------------------------------------------------------------------ overlapped steps
    "compute does not wait for the overlapped step of a bucket": Fault(
        StepLoop, "_wait", _nothing, _RATE, "RACE"
    ),
    "states are used before the overlapped step has ended": Fault(
        StepWorker, "drain", _nothing, "stage 3, device, fp32, overlap", "RACE"
    ),
    "gradients are freed while an overlapped step reads them": Fault(
        StepLoop, "__init__", _after(_set("_kept")), _RATE, "FREE"
    ),
    # ------------------------------------------------------------------ CPU memory
    "the step on the CPU begins before the main parameters have arrived": Fault(
        ChunkStep, "start_load", _after(_set("_arrival")), _CPU, "RACE"
    ),
    "the host uses a gradient before it has arrived": Fault(
        OffloadedGrad, "_take_pending", _before(_forgets_arrival), _CPU, "RACE"
    ),
    "a gradient is freed while it is copied to the CPU": Fault(
        OffloadedGrad, "put", _after(_frees_source), _CPU, "FREE"
    ),
    "stepped parameters overwrite the old ones while these are read": Fault(
        *(storage._Uploader, "__init__", _after(_ignores_compute)),
        *("stage 3, cpu optimizer, bf16, evaluation", "RACE"),
    ),
    "shards on the CPU are not page-locked": Fault(
        storage, "aligned_empty", _unpinned, "stage 3, cpu parameters, bf16, accumulate", "WAIT"
    ),
    "backward uses an activation before it is back": Fault(
        *(activations._Offloaded, "fetch", _after(_set("_fetch_done"))),
        *("stage 3, device, fp16, activations", "RACE"),
    ),
    # ------------------------------------------------------------------ files
    "the pool of buffers forgets the copies that read them": Fault(
        *(BufferPool, "release"),
        lambda right: lambda self, buffer, left=None: right(self, buffer),
        *(_NVME, "RACE"),
    ),
    "a file is used before it has been read": Fault(Transfer, "wait", _nothing, _NVME, "RACE"),
    "a job runs before its buffer has been read": Fault(
        _Slot, "wait_for_reads", _nothing, "stage 3, nvme optimizer, fp32, average", "RACE"
    ),
}
