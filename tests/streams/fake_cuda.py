"""A CUDA device that is not there: fake tensors whose every use is reported to the clocks.

[Note: Doubles] What is doubled is what the device would do: streams and events; memory that is
pinned; files (whose transfers are streams of their own); and what torch answers for tensors with
values only: `data_ptr`, `item`. Collectives are those of torch's fake process group, in which this
process is rank 0. Messages between ranks, and the probe of an optimizer, use real tensors of
the CPU. A step worker runs its loop at once, for dispatch modes belong to a thread; its stream is
its own.
"""

from __future__ import annotations

import ctypes
import linecache
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

import lightning_zero
from lightning_zero import activations
from lightning_zero.comm.control import GlooControlPlane
from lightning_zero.core import step_worker
from lightning_zero.engine import optimizers
from lightning_zero.tensors import guarded
from lightning_zero.tensors.lazy import LazyTensor
from lightning_zero.tensors.sharded import ShardedTensor
from lightning_zero.tiers import memory, nvme
from tests.streams.clocks import COMPUTE, HOST, Clocks, Region

__all__ = ["DEVICE", "FakeCuda"]

DEVICE = torch.device("cuda", 0)
_PACKAGE = str(Path(lightning_zero.__file__).parent)
_OTHERS = (DTensor, ShardedTensor, LazyTensor)  # run operations of their own on what they hold
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)


def _place() -> str:
    """The innermost lines of the engine that are being run."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < 3:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            found.append(f"{file[len(_PACKAGE) + 1 :]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "outside"


def _name_of_stream(maker: FrameType) -> str:
    """Name of a stream: the file that makes it, and the attribute or variable that it becomes."""
    file = Path(maker.f_code.co_filename)
    line = linecache.getline(str(file), maker.f_lineno)
    assigned = re.match(r"\s*(?:self\.)?(\w+) = ", line)
    return f"{assigned[1]} of {file.name}" if assigned else f"the stream of {file.name}"


class _Stream(torch.Stream):
    """One stream; torch asks for its own class."""

    cuda: FakeCuda

    def wait_stream(self, other: _Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: _Event) -> None:
        self.cuda.clocks.wait(self.stream_id, event.number)

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event(self.cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.cuda.clocks.synchronize([self.stream_id], "synchronize of a stream")


class _Event:
    """One event. It is known to be complete only after the host has waited for it.

    One that was never recorded is complete, as in CUDA.
    """

    _last = 1 << 40  # those of C++ begin at 1

    def __init__(self, cuda: FakeCuda) -> None:
        _Event._last += 1
        self.number = _Event._last
        self._cuda = cuda

    def record(self, stream: _Stream | None = None) -> None:
        on = self._cuda.current if stream is None else stream.stream_id
        self._cuda.clocks.record(self.number, on)

    def synchronize(self) -> None:
        self._cuda.clocks.wait_on_host(self.number, "synchronize of an event")

    def query(self) -> bool:
        return self._cuda.clocks.is_known(self.number)

    def elapsed_time(self, other: _Event) -> float:
        """Milliseconds; here the number of events that were made in between."""
        return float(other.number - self.number)


class FakeCuda:
    """One device with its clocks; `on` puts it in the place of CUDA for good.

    Args:
        libraries: Folder of the two that are built from device.cpp and accelerator.cpp, of which
            the latter is preloaded.
        make_clocks: Makes the clocks, of a function that returns the place in the code.

    Attributes:
        clocks: See there.
    """

    def __init__(
        self, libraries: Path, make_clocks: Callable[[Callable[[], str]], Clocks] = Clocks
    ) -> None:
        self.clocks = make_clocks(_place)
        self.clocks.names[COMPUTE] = "compute"
        self._device = ctypes.CDLL(str(libraries / "libdevice.so"))
        self._device.zero_install.restype = ctypes.c_void_p
        self._device.zero_current_stream.restype = ctypes.c_int64
        self._device.zero_set_stream.argtypes = [ctypes.c_int64]
        accelerator = ctypes.CDLL(str(libraries / "libaccelerator.so"))
        accelerator.zero_set_accelerator.argtypes = [ctypes.c_void_p]
        self._callbacks = (
            _CALLBACK(self.clocks.record),
            _CALLBACK(lambda event, stream: self.clocks.wait(stream, event)),
        )
        accelerator.zero_set_accelerator(self._device.zero_install(*self._callbacks))
        self._num_made = 0
        self._pinned: dict[int, bool] = {}  # by storage, whether torch's allocator has it
        self._devices: dict[int, torch.device] = {}  # of storages

    @contextmanager
    def on(self, size: int) -> Iterator[None]:
        """Inside, tensors of DEVICE are fake, and this process is rank 0 of `size`; 0: alone."""
        from torch.testing._internal.distributed.fake_pg import FakeStore

        self._double_torch()
        self._double_engine()
        if size:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        with FakeTensorMode(allow_non_fake_inputs=True), _Checker(self):
            yield

    # ---------------------------------------------------------------- streams and memory

    @property
    def current(self) -> int:
        """The stream of this thread."""
        return int(self._device.zero_current_stream())

    def make_stream(self, device: torch.device | None = None, priority: int = 0) -> _Stream:
        """As `torch.cuda.Stream`."""
        assert device is None or device.type == "cuda", device
        self._num_made += 1
        self.clocks.names[self._num_made] = _name_of_stream(sys._getframe(2))
        return self._stream(self._num_made)

    def _stream(self, number: int) -> _Stream:
        stream = _Stream(stream_id=number, device_index=0, device_type=1)
        stream.cuda = self
        return stream

    def current_stream(self, device: torch.device | None = None) -> _Stream:
        """As `torch.cuda.current_stream`."""
        return self._stream(self.current)

    def make_event(self, enable_timing: bool = False) -> _Event:
        """As `torch.cuda.Event`."""
        return _Event(self)

    @contextmanager
    def on_stream(self, stream: _Stream | None) -> Iterator[None]:
        """As `torch.cuda.stream`."""
        before = self.current
        if stream is not None:
            self._device.zero_set_stream(stream.stream_id)
        try:
            yield
        finally:
            self._device.zero_set_stream(before)

    def synchronize(self, device: torch.device | None = None) -> None:
        """As `torch.cuda.synchronize`."""
        self.clocks.synchronize(None, "synchronize of the device")

    def region(self, tensor: Tensor) -> Region:
        """Its bytes; memory that was not known is new, in the pool of the current stream."""
        storage = torch._C.TensorBase.untyped_storage(tensor)
        key = storage._cdata
        if not self.clocks.knows(key):
            self._devices[key] = tensor.device
            self.clocks.allocate(key, self.current if tensor.device.type == "cuda" else HOST)
            finalize(storage, self._forget, key).atexit = False
        size = tensor.element_size()
        start = tensor.storage_offset() * size
        if tensor.numel() == 0:
            return key, start, start
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        return key, start, start + (1 + sum((n - 1) * step for n, step in sizes)) * size

    def pin(self, tensor: Tensor, *, is_cached: bool) -> None:
        """Copies from and to its memory go beside the host.

        Args:
            tensor: On the CPU.
            is_cached: By torch, whose allocator waits for them before it uses the memory again.
        """
        self._pinned[self.region(tensor)[0]] = is_cached

    def copied_beside(self, tensor: Tensor) -> None:
        """A copy from or to this tensor of the CPU has been queued, without a wait for it."""
        storage, _, _ = self.region(tensor)
        if storage not in self._pinned:
            why = "a copy of memory that is not pinned"
            self.clocks.synchronize([self.current], why)
        elif self._pinned[storage]:
            self.clocks.guard(storage, self.current)

    def device_of(self, tensor: FakeTensor) -> torch.device:
        """A fake tensor keeps the device of its birth; `p.data = other` may have moved it."""
        key = torch._C.TensorBase.untyped_storage(tensor)._cdata
        return self._devices.get(key) or tensor.fake_device

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Before it is: its memory is freed, or new."""
        key = storage._cdata
        if nbytes == 0:
            self.clocks.free(key)
            self.clocks.allocate(key, self.current)
        else:
            device = self._devices.get(key, DEVICE)
            self.clocks.allocate(key, self.current if device.type == "cuda" else HOST)

    def _forget(self, key: int) -> None:
        self.clocks.free(key)
        self._pinned.pop(key, None)
        self._devices.pop(key, None)

    # ---------------------------------------------------------------- doubles

    def _double_torch(self) -> None:
        cuda: Any = torch.cuda
        cuda.current_stream, cuda.stream = self.current_stream, self.on_stream
        cuda.Stream, cuda.Event = self.make_stream, self.make_event
        cuda.synchronize, cuda.set_device = self.synchronize, lambda device: None
        cuda.current_device, cuda.is_current_stream_capturing = (lambda: 0), (lambda: False)
        cuda.empty_cache = lambda: None
        cuda.get_device_capability = lambda device=None: (9, 0)
        scalers: Any = torch.amp.GradScaler
        scalers._maybe_opt_step = _step_after_a_look
        common: Any = torch.cuda.amp.common
        common.amp_definitely_not_available = lambda: False

        def device(tensor: FakeTensor) -> torch.device:
            is_inside = tensor.fake_mode.in_kernel_invocation
            return torch.device("meta") if is_inside else self.device_of(tensor)

        fakes: Any = FakeTensor
        fakes.device = property(device)
        # Otherwise torch sees an address and copies the storage.
        fakes.__deepcopy__ = lambda tensor, memo: tensor.detach().clone()
        handlers: Any = fake_tensor._DISPATCH_META_HANDLERS
        handlers[torch.ops.prim.device.default] = lambda args: self.device_of(args[0])
        tensors: Any = Tensor
        tensors.data_ptr = lambda tensor: self._address(tensor)
        tensors.is_set_to = lambda one, other: self._is_set_to(one, other)
        storages: Any = torch.UntypedStorage
        resize = storages.resize_

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            self.resized(storage, nbytes)
            return resize(storage, nbytes)

        storages.resize_ = resize_

    def _address(self, tensor: Tensor) -> int:
        if tensor.numel() == 0:
            return 0
        key, start, _ = self.region(tensor)
        return (key << 44) + start

    def _is_set_to(self, one: Tensor, other: Tensor) -> bool:
        is_there = self._address(one) == self._address(other)
        return is_there and one.shape == other.shape and one.stride() == other.stride()

    def _double_engine(self) -> None:
        for name in ("min_ints", "union", "broadcast_object", "gather_objects", "gather_floats"):
            setattr(GlooControlPlane, name, _on_real_tensors(getattr(GlooControlPlane, name)))
        optimizers.probe = _probe_on_cpu(optimizers.probe)
        memory._map = self._map
        nvme.supports_o_direct = lambda folder: False
        nvme.NvmeFile._begin = _begin_transfer(self)
        step_worker.ThreadPoolExecutor = _AtOnce

        activations.Tensor = FakeTensor  # subclasses of Tensor stay

        class FakeGuarded(guarded.GuardedParameter, FakeTensor):
            pass

        guarded.GuardedParameter = FakeGuarded

    def _map(self, nbytes: int, *, pin: bool) -> tuple[Tensor, Any]:
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        if pin:
            self.pin(tensor, is_cached=False)
        return tensor, SimpleNamespace(wipe_on_fork=lambda: None)


class _Checker(TorchDispatchMode):
    """Reports to the clocks what every operation reads and writes."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name == "device":
            return self._cuda.device_of(args[0])
        if any(isinstance(leaf, _OTHERS) for leaf in tree_iter((args, kwargs))):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            if name == "record_stream":
                storage, _, _ = self._cuda.region(args[0])
                self._cuda.clocks.guard(storage, args[1].stream_id)
                return None
            given = _Given.to(func, name, args, kwargs)
            if (answer := self._answer(name, args, given)) is not None:
                return answer
            known = {self._cuda.region(tensor)[0] for tensor in (*given.reads, *given.writes)}
            is_fake = func._overloadname != "tensor_lr"  # which returns nothing anyway
            result = func(*args, **kwargs) if is_fake else None
            made = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
            fresh = [tensor for tensor in made if self._cuda.region(tensor)[0] not in known]
            if kwargs.get("pin_memory"):
                self._cuda.pin(fresh[0], is_cached=True)
            if not _moves_nothing(func, name):
                given.writes += fresh
                self._use(name, given, is_beside=_is_beside(name, args, kwargs), fresh=fresh)
            return result

    def _answer(self, name: str, args: Any, given: _Given) -> Any:
        """What an operation that looks at values answers; None: it is an ordinary one."""
        cuda = self._cuda
        if name == "is_set_to":
            return cuda._is_set_to(*args)
        if name not in ("_local_scalar_dense", "equal"):
            return None
        stream = cuda.current if given.is_on_device else HOST
        cuda.clocks.use(stream, map(cuda.region, given.reads), (), name)
        if given.is_on_device:
            cuda.clocks.synchronize([stream], f"{name} of a tensor of the device")
        if name == "equal" or args[0].dtype is torch.bool:
            return True
        return 0.5 if args[0].is_floating_point() else 1  # no division by it fails

    def _use(self, name: str, given: _Given, *, is_beside: bool, fresh: list[Tensor]) -> None:
        cuda = self._cuda
        regions = partial(map, cuda.region)
        if not given.is_on_device:
            cuda.clocks.use(HOST, regions(given.reads), regions(given.writes), name)
            return
        is_copy = name in ("copy_", "_to_copy")
        numbers = [t for t in given.reads if not is_copy and t.device.type == "cpu"]
        if numbers:  # 0-dim ones, which the host reads to launch a kernel
            cuda.clocks.use(HOST, regions(numbers), (), name)
        reads = [tensor for tensor in given.reads if all(tensor is not n for n in numbers)]
        cuda.clocks.use(cuda.current, regions(reads), regions(given.writes), name)
        of_cpu = [t for t in (*reads, *given.writes) if t.device.type == "cpu" and t.numel()]
        if not is_copy or not of_cpu:
            return
        for tensor in of_cpu:
            if is_beside and any(tensor is one for one in fresh):
                cuda.pin(tensor, is_cached=True)  # as torch does
        if not is_beside:
            cuda.clocks.synchronize([cuda.current], f"a blocking {name}")
        for tensor in of_cpu if is_beside else ():
            cuda.copied_beside(tensor)


class _Given:
    """Tensors that an operation reads, and those it writes to."""

    def __init__(self) -> None:
        self.reads: list[Tensor] = []
        self.writes: list[Tensor] = []

    @staticmethod
    def to(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> _Given:
        given = _Given()
        arguments = func._schema.arguments
        values = [*zip(arguments, args, strict=False)]
        values += [(one, kwargs[one.name]) for one in arguments if one.name in kwargs]
        written = _COLLECTIVES.get(name)
        assert (written is None) == (func.namespace != "c10d"), f"what does {name} write?"
        for number, (argument, value) in enumerate(values):
            alias = argument.alias_info
            is_write = alias is not None and alias.is_write
            if written is not None:
                is_write = number in written
            into = given.writes if is_write else given.reads
            into += [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]
        return given

    @property
    def is_on_device(self) -> bool:
        return any(tensor.device.type == "cuda" for tensor in (*self.reads, *self.writes))


# Whose schemas do not say what is written: numbers of arguments.
_COLLECTIVES = {
    "allreduce_": (0,),
    "broadcast_": (0,),
    "allgather_": (0,),
    "_allgather_base_": (0,),
    "reduce_scatter_": (0,),
    "_reduce_scatter_base_": (0,),
    "alltoall_base_": (0,),
}
_NO_VALUES = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
_SAME_MEMORY = ("_unsafe_view", "lift_fresh", "set_", "resize_")


def _moves_nothing(func: Any, name: str) -> bool:
    """It makes views or memory, and touches no value."""
    aliases = [one.alias_info for one in func._schema.returns]
    is_view = bool(aliases) and all(one is not None and not one.is_write for one in aliases)
    return is_view or name in (*_NO_VALUES, *_SAME_MEMORY)


def _is_beside(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """A copy was asked for that does not make the host wait."""
    if name == "copy_" and len(args) > 2:
        return bool(args[2])
    return bool(kwargs.get("non_blocking", False))


class _AtOnce:
    """An executor that runs what it is given when it is given. See [Note: Doubles]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work())
        return done

    def shutdown(self) -> None:
        pass


def _step_after_a_look(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """As torch's for an optimizer that cannot leave out a step itself; no value is infinite."""
    for found in state["found_inf_per_device"].values():
        found.item()
    return optimizer.step(*args, **kwargs)


def _on_real_tensors(run: Callable[..., Any]) -> Callable[..., Any]:
    def without_modes(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return run(*args, **kwargs)

    return without_modes


def _probe_on_cpu(probe: Callable[..., Any]) -> Callable[..., Any]:
    """The probe of an optimizer, whose learning rate may be a fake tensor."""
    run = _on_real_tensors(probe)

    def probe_on_cpu(optimizer: Any, device: torch.device) -> Any:
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        found = run(optimizer, torch.device("cpu"))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return found

    return probe_on_cpu


def _begin_transfer(cuda: FakeCuda) -> Callable[..., Any]:
    """A file's read or write: a stream that begins now, and that `wait_until_done` waits for."""

    class Transfer(nvme.Transfer):
        number: int  # of its event
        memory: Tensor | None  # alive until it is done

        def wait_until_done(self) -> None:
            super().wait_until_done()
            cuda.clocks.wait_on_host(self.number, None)
            self.memory = None

    def begin(
        file: Any, offset: int, tensor: Tensor, after: Iterable[Transfer], *, is_write: bool
    ) -> Transfer:
        stop = offset + tensor.nbytes
        recorder = file._store.recorder
        new = Transfer(file.name, recorder, is_write=is_write, start=offset, stop=stop)
        disk = cuda.make_stream(DEVICE)
        assert disk is not None
        cuda.clocks.names[disk.stream_id] = "the disk"
        for other in after:
            cuda.clocks.wait(disk.stream_id, other.number)
        region = [cuda.region(tensor)]
        what = "a write of a file" if is_write else "a read of a file"
        cuda.clocks.use(disk.stream_id, *((region, ()) if is_write else ((), region)), what)
        new.memory = tensor
        new.number = disk.record_event().number
        new.begin([], file._store.writing)
        return new

    return begin
