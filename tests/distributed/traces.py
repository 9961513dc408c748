"""What a function leaves behind in the process that ran it: undone, or named.

[Note: traces] One process runs the functions of many tests, one after another. What a function can
change there is of two kinds. `Process.restore` undoes what can be undone for sure: variables, the
working directory, signal handlers, seeds, flags of torch, logging, caches, process groups. It finds
and names what cannot: threads, processes, open files, limits, modes, and attributes of modules and
classes that are other objects than before (a test that patches the product, a method that keeps
something on its class). The process is replaced then: always right, and it costs a fork.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import operator
import os
import random
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from signal import (
    ITIMER_REAL,
    SIG_BLOCK,
    SIG_SETMASK,
    getsignal,
    pthread_sigmask,
    setitimer,
    signal,
    valid_signals,
)
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import WarningCache, rank_zero_only
from torch.distributed import distributed_c10d

__all__ = ["Process"]

# All modules of these packages are watched, with their classes.
_PACKAGES = ("examples", "lightning", "lightning_zero", "tests")
_OWN_PACKAGES = ("examples", "lightning_zero", "tests")  # whose caches are emptied
_MODULES = (
    *("builtins", "os", "posixpath", "pathlib", "shutil", "signal", "socket", "subprocess", "sys"),
    *("tempfile", "threading", "time", "torch", "torch.autograd", "torch.cuda"),
    *("torch.distributed", "torch.distributed.checkpoint", "torch.distributed.distributed_c10d"),
    *("torch.multiprocessing", "torch.nn.functional", "torch.serialization"),
)
_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Module, torch.optim.Optimizer)
# What Python and torch write where they like.
_UNTOLD = {"__annotations__", "__slotnames__", "__warningregistry__", "__path__", "__cached__"}
_UNTOLD |= {"_backend", "_default_pg_init_method", "_pg_default_device"}  # of distributed_c10d
_UNTOLD |= {"argv", "path", "stdout", "stderr", "excepthook", "modules"}  # of sys; restored
_UNTOLD |= {"last_exc", "last_type", "last_value", "last_traceback"}
_UNTOLD |= {"_name_sequence", "_once_lock"}  # of tempfile, made when first asked for a name

_LIMITS = (
    *(resource.RLIMIT_AS, resource.RLIMIT_CORE, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE),
    *(resource.RLIMIT_NOFILE, resource.RLIMIT_STACK),
)
_END_S = 2.0  # for threads that are about to end
_CACHED = type(functools.cache(print))


class Process:
    """This process, to which one call after another happens."""

    def __init__(self) -> None:
        self._undo = [*_plain_state(), *_state_of_torch()]
        self._found = {name: find() for name, find in _FINDERS.items()}
        self._loggers: dict[logging.Logger, _LoggerState] = {}
        self._watched: list[_Watched] = [_Watched(one) for one in _CLASSES]
        self._caches: list[Callable[[], object]] = []
        self._modules: dict[str, Any] = {}
        self.look()

    def look(self) -> None:
        """Takes new modules as they are. After the import of a function, before its call."""
        for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
            if isinstance(logger, logging.Logger) and logger not in self._loggers:
                self._loggers[logger] = _logger_state(logger)
        if len(sys.modules) == len(self._modules):
            return
        for watched in self._watched:
            watched.changed()  # a package has its modules as attributes
        for name, module in [*sys.modules.items()]:
            if name not in self._modules:
                self._modules[name] = module
                if isinstance(module, ModuleType):
                    self._watch(name, module)

    def restore(self) -> list[str]:
        """Undoes what can be undone.

        Returns:
            What cannot; empty if nothing is left.
        """
        left = _leave_groups()
        for undo in self._undo:
            undo()
        for logger, state in self._loggers.items():
            _restore_logger(logger, state)
        for clear in self._caches:
            clear()
        _clear_others()
        gc.collect()
        deadline = time.monotonic() + _END_S
        for thread in _threads() - self._found["threads"]:
            thread.join(max(0.0, deadline - time.monotonic()))
        for name, find in _FINDERS.items():
            before, now = self._found[name], find()
            if now != before:
                if isinstance(now, set):
                    now = now - before
                left.append(f"{name}: {now!r:.400}")
        for watched in self._watched:
            left += watched.changed()
        left += [f"sys.modules[{name!r}]" for name in self._modules if self._is_other(name)]
        gc.freeze()  # what lives is walked no more, neither by the next restore nor by a test
        return left

    def _watch(self, name: str, module: ModuleType) -> None:
        package = name.partition(".")[0]
        if package not in _PACKAGES and name not in _MODULES:
            return
        self._watched.append(_Watched(module))
        if package not in _PACKAGES:
            return
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == name:
                self._watched.append(_Watched(value))
            elif isinstance(value, WarningCache):
                self._caches.append(value.clear)
            elif type(value) is _CACHED and package in _OWN_PACKAGES:
                self._caches.append(value.cache_clear)

    def _is_other(self, name: str) -> bool:
        return sys.modules.get(name) is not self._modules[name]


class _Watched:
    """The attributes of a module or a class, and what its lists, dicts and sets hold."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._names = [*vars(owner)]
        self._values = [*vars(owner).values()]
        is_own = getattr(owner, "__module__", owner.__name__).partition(".")[0] in _OWN_PACKAGES
        self._sizes = [
            (name, len(value))
            for name, value in zip(self._names, self._values, strict=True)
            if is_own and type(value) in (dict, list, set) and name not in _UNTOLD
        ]

    def changed(self) -> list[str]:
        """Names of attributes that are other objects than before, new, gone, or that have grown."""
        now = vars(self._owner)
        others = [name for name, size in self._sizes if len(now.get(name, ())) != size]
        same = len(now) == len(self._names) and all(map(operator.is_, now.values(), self._values))
        if not same:
            before = dict(zip(self._names, self._values, strict=True))
            others += [n for n in before.keys() | now.keys() if _is_told(n, before, now)]
            self._names, self._values = [*now], [*now.values()]
        owner = self._owner.__name__
        if isinstance(self._owner, type):
            owner = f"{self._owner.__module__}.{owner}"
        return [f"{owner}.{name}" for name in others]


def _is_told(name: str, before: dict[str, Any], now: Any) -> bool:
    missing = object()
    value = now.get(name, missing)
    if value is before.get(name, missing) or name in _UNTOLD:
        return False
    if name == "step" and hasattr(value, "hooked"):
        return False  # an optimizer, when the first is made, wraps the method of its class
    return not (isinstance(value, ModuleType) and name not in before)  # imported meanwhile


def _plain_state() -> Iterator[Callable[[], object]]:
    """Each puts back, as it is now, one thing that has nothing to do with torch."""
    yield functools.partial(os.chdir, "/")  # the folder of the call is deleted
    yield functools.partial(_restore_environment, dict(os.environ))
    for name in ("argv", "path", "stdout", "stderr", "excepthook"):
        yield functools.partial(setattr, sys, name, getattr(sys, name))
    for found in (sys.argv, sys.path):
        yield functools.partial(operator.setitem, found, slice(None), [*found])
    for signum in valid_signals():
        handler = getsignal(signum)
        if handler is not None:
            yield functools.partial(_restore_handler, signum, handler)
    yield functools.partial(pthread_sigmask, SIG_SETMASK, pthread_sigmask(SIG_BLOCK, []))
    yield functools.partial(setitimer, ITIMER_REAL, 0)
    yield functools.partial(socket.setdefaulttimeout, socket.getdefaulttimeout())
    yield gc.enable if gc.isenabled() else gc.disable
    yield functools.partial(gc.set_threshold, *gc.get_threshold())
    yield functools.partial(logging.disable, logging.root.manager.disable)
    yield functools.partial(random.setstate, random.getstate())
    yield functools.partial(np.random.set_state, np.random.get_state())
    yield functools.partial(setattr, rank_zero_only, "rank", getattr(rank_zero_only, "rank", None))


def _state_of_torch() -> Iterator[Callable[[], object]]:
    for put, value in (
        (torch.set_default_dtype, torch.get_default_dtype()),
        (torch.set_num_threads, torch.get_num_threads()),
        (torch.set_grad_enabled, torch.is_grad_enabled()),
        (torch.set_warn_always, torch.is_warn_always_enabled()),
        (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        (torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()),
        (torch.set_rng_state, torch.get_rng_state()),
        (
            torch.multiprocessing.set_sharing_strategy,
            torch.multiprocessing.get_sharing_strategy(),
        ),
    ):
        yield functools.partial(put, value)
    yield functools.partial(torch.set_autocast_enabled, "cpu", torch.is_autocast_enabled("cpu"))
    yield functools.partial(torch.set_autocast_dtype, "cpu", torch.get_autocast_dtype("cpu"))
    yield functools.partial(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    yield functools.partial(
        torch.autograd.set_detect_anomaly,
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
    )
    cudnn = torch.backends.cudnn
    for name in ("benchmark", "deterministic"):
        yield functools.partial(setattr, cudnn, name, getattr(cudnn, name))


def _restore_environment(environment: dict[str, str]) -> None:
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)


def _restore_handler(signum: int, handler: Any) -> None:
    if getsignal(signum) is not handler:
        signal(signum, handler)


_LoggerState = tuple[int, bool, bool, list[Any], list[Any]]


def _logger_state(logger: logging.Logger) -> _LoggerState:
    return (
        *(logger.level, logger.propagate, logger.disabled),
        *([*logger.handlers], [*logger.filters]),
    )


def _restore_logger(logger: logging.Logger, state: _LoggerState) -> None:
    if _logger_state(logger) != state:
        level, logger.propagate, logger.disabled, logger.handlers, logger.filters = state
        logger.handlers, logger.filters = [*logger.handlers], [*logger.filters]
        logger.setLevel(level)  # also clears what is cached


def _clear_others() -> None:
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.utils.counters:  # something was compiled
        dynamo.reset()
        dynamo.utils.counters.clear()
    hydra = sys.modules.get("hydra.core.global_hydra")
    if hydra is not None:
        hydra.GlobalHydra.instance().clear()


def _leave_groups() -> list[str]:
    """Destroys all process groups."""
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        return [f"destroy_process_group: {error}"]
    return ["process groups"] if distributed_c10d._world.pg_map else []


def _threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def _children() -> set[str]:
    children: set[str] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            children |= {*file.read().split()}
    return children


def _files() -> set[str]:
    """Open files of folders; sockets and pipes are torch's and Python's too."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if int(fd) > 2 and target.startswith("/") and not target.startswith(("/dev", "/proc")):
                found.add(f"{target} as {fd}")
    return found


def _file_mode_mask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


def _hooks_of_all_modules() -> list[int]:
    held = vars(torch.nn.modules.module)
    hooks = [value for name, value in held.items() if name.startswith("_global_")]
    return [len(value) for value in hooks if isinstance(value, dict)]


_IS_LINUX = os.path.isdir("/proc/self/task")
_FINDERS: dict[str, Callable[[], Any]] = {
    "threads": _threads,
    **({"processes": _children, "open files": _files} if _IS_LINUX else {}),
    "limits": lambda: [resource.getrlimit(limit) for limit in _LIMITS],
    "file mode mask": _file_mode_mask,
    "hooks of all modules": _hooks_of_all_modules,
    "inference mode": torch.is_inference_mode_enabled,
    "torch function modes": torch._C._len_torch_function_stack,
    "torch dispatch modes": torch._C._len_torch_dispatch_stack,
}
