"""Checkpoints on their way to the disk and back: which form they have, who writes them when.

[Note: One save in flight] With `async_save`, `save` returns once this rank's values are copied; a
thread writes them and agrees with the other ranks on a channel of its own. The next save, loading a
checkpoint and the end of fit wait for it, and raise what went wrong in it; the next save first
writes its own, while training waits: it may be the last that can be made. A checkpoint that
Lightning removes because a newer one takes its place is kept until the newer one is complete, and
stays if that fails.

[Note: Every format] Lightning's `load_from_checkpoint` opens its argument as one file of
`torch.save`, through one function of its module `lightning.pytorch.core.saving`.
`patch_load_from_checkpoint` puts another in that function's place: it opens directories, `.safetensors`
files and remote storage, and hands everything else to Lightning's as before. The rest of the loader
(hyperparameters, arguments, strictness) is its own, for all formats.

Alternatives considered: an override of `LightningModule.load_from_checkpoint` would have to repeat
its check of being called on a class, and the loader.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning import __version__ as lightning_version
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.core import saving as lightnings
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero._version import __version__
from lightning_zero.checkpoint import atomic, open_checkpoint
from lightning_zero.checkpoint.atomic import CheckpointPath, local_path, locate
from lightning_zero.checkpoint.checkpoint_shard import CheckpointShard
from lightning_zero.checkpoint.dcp_reader import is_sharded
from lightning_zero.checkpoint.dcp_writer import SavePlanCache, ShardedSave
from lightning_zero.checkpoint.remote import RemotePath, check_shared, is_remote
from lightning_zero.checkpoint.source import find_damage, raise_damage
from lightning_zero.checkpoint.states import (
    replicated_as_shards,
    sharded_masters,
    sharded_optimizer_state,
    sharded_state_dict,
    shards_in,
)
from lightning_zero.checkpoint.torch_file import write_torch_file
from lightning_zero.comm.control import Channel
from lightning_zero.engine.counting import full_checkpoint_bytes
from lightning_zero.engine.engine import Engine
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.sizes import format_bytes
from lightning_zero.tiers.memory import available_memory_bytes, local_world_size

__all__ = [
    "MASTERS_KEY",
    "METADATA_KEY",
    "CheckpointType",
    "Saving",
    "ZeroCheckpointIO",
    "patch_load_from_checkpoint",
    "is_download",
    "is_user_io",
]


CheckpointType = Literal["auto", "full", "sharded"]
MASTERS_KEY = "lightning_zero_masters"
METADATA_KEY = "lightning_zero"  # in the sharded form: who wrote it

_CHECKPOINT_TYPES = get_args(CheckpointType)
_SHARDED_NUMEL = 2**31  # parameters from which on "auto" is sharded


class Saving:
    """Decides on the form and writes the sharded one; `is_async`: while training goes on."""

    def __init__(self, form: CheckpointType, *, is_async: bool) -> None:
        if form not in _CHECKPOINT_TYPES:
            raise ValueError(f"checkpoint must be one of {_CHECKPOINT_TYPES}, got {form!r}.")
        if is_async and form == "full":
            raise ValueError(
                'async_save needs the sharded form, got checkpoint="full"; use '
                'checkpoint="sharded", or lightning.pytorch.plugins.AsyncCheckpointIO.'
            )
        self._form = form
        self._is_async = is_async
        # No daemon: a process that ends waits for the thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zero-save")
        self._in_flight: list[Future[None]] = []  # a save, and what is to follow it
        self._channel: Channel | None = None
        self._planned = SavePlanCache()  # over that channel
        self._shards: dict[str, CheckpointShard] = {}  # handed out for the next save, by source
        self._has_warned = False
        self._is_sharded: bool | None = None  # what "auto" means in this run; None: not decided yet
        self._memory: dict[str, Tensor] = {}  # on the CPU; of the asynchronous save before

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has the settings, and saves for itself.
        return partial(Saving, is_async=self._is_async), (self._form,)

    # ---------------------------------------------------------------- which form

    def check(self, checkpoint_io: CheckpointIO | None) -> None:
        """Refuses a `CheckpointIO` of the user's for the sharded form, which does not use it."""
        if self._form == "sharded" and is_user_io(checkpoint_io):
            raise ValueError(
                f'checkpoint="sharded" writes by itself and would not use '
                f'{type(checkpoint_io).__name__}; use checkpoint="full", or no checkpoint_io.'
            )

    def check_callbacks(self, trainer: Trainer, *, is_sharded: bool) -> None:
        """Refuses callbacks that would lose checkpoints; after their own set-up.

        They would on storage that each rank has for itself, and by names that `ModelCheckpoint`
        tells apart by what is there already, when saves are still in flight.
        """
        callbacks = trainer.checkpoint_callbacks
        for callback in callbacks:
            check_shared(getattr(callback, "dirpath", None) or "", trainer.world_size)
        if self._is_async and is_sharded and any(_reuses_names(c) for c in callbacks):
            raise ValueError(
                "async_save needs another name for each checkpoint of ModelCheckpoint, which looks "
                "for those that exist before they are complete; put {step} into its filename."
            )
        if self._is_async and any(getattr(c, "save_last", None) == "link" for c in callbacks):
            rank_zero_warn(
                'ModelCheckpoint(save_last="link") makes its link at once, and async_save ends the '
                "checkpoint later: a job that is killed in between leaves a link to nothing; use "
                "save_last=True."
            )

    def is_sharded(self, module: nn.Module, checkpoint_io: CheckpointIO | None) -> bool:
        """Whether a checkpoint is written in the sharded form; see `decide`."""
        if self._form != "auto":
            return self._form == "sharded"
        if is_user_io(checkpoint_io):
            return False
        if self._is_sharded is not None:
            return self._is_sharded
        return sum(p.numel() for p in module.parameters()) >= _SHARDED_NUMEL

    def decide(self, engine: Engine, resumed: _PATH | None = None) -> None:
        """Decides what "auto" means for the run that begins. Collective: every rank.

        The sharded form, where the full one would not be at home in the CPU memory of rank 0:
        where parameters or optimizer states are offloaded, and where a full checkpoint takes more
        than half of the free memory. And from 2^31 elements on, since one rank writes the full one.
        At a remote address neither form replaces the other, so there a run keeps that of `resumed`,
        the checkpoint that it goes on from: it may write to that name again.
        """
        if self._form != "auto":
            return
        if resumed is not None and is_remote(resumed) and not is_download(resumed):
            is_full = not is_sharded(locate(resumed))
        else:
            reason = _why_sharded(engine)
            is_full = reason is None
            if reason is not None:
                rank_zero_info(
                    f'checkpoint="auto": checkpoints are sharded directories, since {reason}; '
                    'checkpoint="full" writes one file.'
                )
        self._is_sharded = not engine.comm.control.min_ints([int(is_full)])[0]

    # ---------------------------------------------------------------- what is saved

    def state_dict(
        self,
        engine: Engine,
        module: nn.Module,
        kind: str = "parameter",
        *,
        is_closed: bool = False,
    ) -> dict[str, Any]:
        """Entries of the module, or of a shadow of it; see `sharded_state_dict`. Local."""
        if is_closed:
            state = replicated_as_shards(module, engine.comm.rank, engine.comm.size)
        else:
            state = sharded_state_dict(module, kind)
        self._shards |= shards_in(state)
        return state

    def optimizer_state(self, optimizer: Optimizer, engine: Engine) -> dict[str, Any]:
        """The optimizer's entries; see `sharded_optimizer_state`. Collective: every rank."""
        state = sharded_optimizer_state(optimizer, engine)
        self._shards |= shards_in(state)
        return state

    def save(
        self,
        checkpoint: dict[str, Any],
        filepath: _PATH,
        engine: Engine,
        *,
        last_masters: dict[str, Tensor] | None = None,
    ) -> None:
        """Writes `checkpoint`, made of entries of this object, as a directory. Collective.

        Args:
            checkpoint: As Lightning dumps it.
            filepath: Rank 0's counts.
            engine: Whose state it is.
            last_masters: After fit: the masters that were kept on rank 0.

        Raises:
            OSError: On every rank: it cannot be written; or it is, and the save in flight before
                could not.
        """
        failure: Exception | None = None
        try:
            self.finish()
        except Exception as error:
            failure = error
        has_failed = failure is not None
        if self._is_async and last_masters is None:  # in the same way on every rank
            has_failed = not engine.comm.control.min_ints([int(failure is None)])[0]
        if has_failed:
            rank_zero_warn(
                f"the checkpoint in flight was not saved ({failure}); {filepath} is written before "
                "that is raised."
            )
        waits = has_failed or not self._is_async
        self._write(checkpoint, filepath, engine, last_masters, waits=waits)
        if has_failed:
            raise failure or RuntimeError("another rank could not save the checkpoint in flight.")

    def _write(
        self,
        checkpoint: dict[str, Any],
        filepath: _PATH,
        engine: Engine,
        last_masters: dict[str, Tensor] | None,
        *,
        waits: bool,
    ) -> None:
        is_closed = last_masters is not None
        if "optimizer_states" in checkpoint:
            masters: dict[str, Any] = dict(last_masters or {})
            if not is_closed:
                masters = dict(sharded_masters(engine))
                self._shards |= shards_in(masters)
            if masters:
                checkpoint[MASTERS_KEY] = masters
        checkpoint[METADATA_KEY] = checkpoint.get(METADATA_KEY, {}) | {
            "version": __version__,
            "stage": engine.config.stage,
            "world_size": engine.comm.size,
        }
        if self._channel is None or not self._channel.is_open:
            self._channel, self._planned = engine.comm.open_channel(), SavePlanCache()
        channel = self._channel
        shards, self._shards = self._shards, {}
        check_shared(filepath, channel.size)
        with channel.session():
            save = ShardedSave.prepare(checkpoint, locate(filepath), shards, channel, self._planned)
            if waits or is_closed or not self._may_copy(save, engine):
                save.run()
                return
            pin = engine.device.type == "cuda"
            try:
                # Memory may be short on one rank only.
                channel.attempt(lambda: save.snapshot(self._memory, pin=pin))
            except BaseException:
                self._memory.clear()
                raise
        assert not self._in_flight, "one at a time"
        self._in_flight.append(self._thread.submit(_run_in_session, save))

    def _may_copy(self, save: ShardedSave, engine: Engine) -> bool:
        """Whether every rank has the CPU memory for its copy. Collective."""
        held = sum(kept.nbytes for kept in self._memory.values())
        room = available_memory_bytes() // (2 * local_world_size()) + held
        fits = bool(engine.comm.control.min_ints([room - save.snapshot_bytes])[0] >= 0)
        if not fits:
            self._memory.clear()
            if not self._has_warned:
                self._has_warned = True
                rank_zero_warn(
                    f"async_save would copy {save.snapshot_bytes} bytes into CPU memory on each "
                    "rank, more than half of what is free for it on some: training waits for "
                    "this save instead."
                )
        return fits

    # ---------------------------------------------------------------- the save in flight

    def finish(self, *, warns: bool = False) -> None:
        """Waits for the save in flight, and raises what it failed of, once.

        Args:
            warns: Only warn of its failure, because something else has failed already.
        """
        wait(self._in_flight)
        under_way, self._in_flight = self._in_flight, []
        try:
            for future in under_way:
                future.result()
        except Exception as error:
            if not warns:
                raise
            rank_zero_warn(f"the checkpoint in flight was not saved: {error}")

    def remove(self, filepath: _PATH) -> None:
        """Deletes a checkpoint, once the one in flight has succeeded. On rank 0 only.

        Warns where that fails: the save before has succeeded, and other ranks know nothing.
        """
        place = locate(filepath)
        if not self._in_flight:
            _remove_or_warn(place)
            return
        save = self._in_flight[0]
        self._in_flight.append(
            self._thread.submit(lambda: None if save.exception() else _remove_or_warn(place))
        )

    def free(self) -> None:
        """Frees what is kept from one save to the next. On every rank."""
        self._planned.clear()
        self._memory.clear()
        self._shards.clear()


def _why_sharded(engine: Engine) -> str | None:
    """Why a full checkpoint does not suit this rank, as a clause; None: it does. Local."""
    plans = [bucket.plan for bucket in engine.buckets]
    if sum(plan.layout.numel for plan in plans) >= _SHARDED_NUMEL:
        return f"the module has {_SHARDED_NUMEL} parameters or more"
    if any(tier is not Tier.DEVICE for p in plans for tier in (p.tiers.param, p.tiers.optim)):
        return "parameters or optimizer states are offloaded"
    needed, free = full_checkpoint_bytes(engine.buckets), available_memory_bytes()
    if engine.comm.rank == 0 and needed > free // 2:
        return f"a full one takes {format_bytes(needed)} of {format_bytes(free)} of free CPU memory"
    return None


def is_user_io(checkpoint_io: CheckpointIO | None) -> bool:
    """Whether it is one that the user has given."""
    return type(checkpoint_io) not in (type(None), TorchCheckpointIO, ZeroCheckpointIO)


def _run_in_session(save: ShardedSave) -> None:
    with save.channel.session():
        save.run()


def _remove_or_warn(path: CheckpointPath) -> None:
    try:
        atomic.remove(path)
    except Exception as error:  # remote storage raises what it likes
        rank_zero_warn(f"the old checkpoint {path} could not be deleted and stays: {error}")


def _reuses_names(callback: Checkpoint) -> bool:
    """Whether it keeps several checkpoints under one name and a counter."""
    return (
        isinstance(callback, ModelCheckpoint)
        and callback.save_top_k not in (0, 1)
        and bool(callback.filename)
        and "{" not in str(callback.filename)
    )


# -------------------------------------------------------------------- whole files, and loading


class ZeroCheckpointIO(TorchCheckpointIO):
    """Writes a file whole or not at all, without a copy in memory, and checks it when it is read.

    The file is what `torch.save` writes. Remote storage is written in the same way, and read by
    Lightning where other code than `ZeroStrategy` asks.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None
    ) -> None:
        if storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place = locate(path)
        if isinstance(place, Path):
            atomic.make_folder(place.parent)
        elif is_sharded(place):
            raise FileExistsError(
                errno.EEXIST,
                "a sharded checkpoint is there, which a full one cannot replace at a remote "
                "address; delete it, or choose another name",
                str(place),
            )
        write_torch_file(checkpoint, place)

    @override
    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        if _is_local_file_protocol(path) and local_path(path).is_file():
            raise_damage(path, find_damage(local_path(path)))
        loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
        return loaded


def patch_load_from_checkpoint() -> None:
    """See [Note: Every format]. Doing it again is harmless."""
    load_file: Callable[..., Any] = vars(lightnings)["pl_load"]
    if load_file.__module__ == __name__:
        return

    def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        is_place = isinstance(path_or_url, (str, Path)) and not is_download(path_or_url)
        if is_place:
            raise_damage(path_or_url, find_damage(path_or_url))
        if not is_place or not _is_ours(path_or_url):
            return load_file(path_or_url, map_location=map_location, weights_only=weights_only)
        checkpoint = open_checkpoint(path_or_url, weights_only=weights_only)
        checkpoint.setdefault("pytorch-lightning_version", lightning_version)
        if isinstance(map_location, (str, torch.device)):
            # The module follows its first tensor.
            state_dict = checkpoint["state_dict"]
            checkpoint["state_dict"] = {
                name: value.to(map_location) if isinstance(value, Tensor) else value
                for name, value in state_dict.items()
            }
        return checkpoint

    lightnings.pl_load = load  # type: ignore[attr-defined]


def is_download(path: _PATH) -> bool:
    """Whether it is an address of the web, which Lightning downloads as a whole."""
    return str(path).startswith(("http://", "https://"))


def _is_ours(path: _PATH) -> bool:
    place = locate(path)
    return isinstance(place, RemotePath) or place.is_dir() or place.suffix == ".safetensors"
