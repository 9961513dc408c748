"""Saving and loading of checkpoints: full or sharded, synchronous or asynchronous.

[Note: One save in flight] With `async_save`, `save` returns once this rank's values are copied. A
thread writes them and synchronizes with the other ranks over its own channel. The next save,
loading a checkpoint and the end of fit wait for the thread and raise its error. A save after a
failed one first writes its own checkpoint, while training waits: it may be the last one possible. A
checkpoint that Lightning removes in favor of a newer one is kept until the newer one is complete,
and stays if that fails.

[Note: Entries of a rank] Lightning assembles a checkpoint from `state_dict` and `optimizer_state`,
lets the user's hooks change it, and passes it to `save`. As with a full checkpoint, the hooks of
rank 0 decide what is written. Those of another rank may have renamed, cast or deleted entries in
its checkpoint that rank 0 writes. So a rank also keeps the entries that it has returned, by their
source, until `save` takes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Literal, get_args

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero._lightning.fabric import (
    _PATH,
    CheckpointIO,
    TorchCheckpointIO,
    _is_local_file_protocol,
)
from lightning_zero._lightning.pytorch import Callback, Checkpoint, ModelCheckpoint, Trainer
from lightning_zero.checkpoint.checkpoint_shard import CheckpointShard
from lightning_zero.checkpoint.dcp_reader import is_sharded
from lightning_zero.checkpoint.dcp_writer import SavePlanCache, ShardedSave
from lightning_zero.checkpoint.rank_states import (
    add_rank_states,
    encode_on_all_ranks,
    rank_state_shard,
)
from lightning_zero.checkpoint.source import find_damage, raise_damage
from lightning_zero.checkpoint.states import (
    MASTERS_KEY,
    METADATA_KEY,
    describe_save,
    replicated_as_shards,
    sharded_masters,
    sharded_optimizer_state,
    sharded_state_dict,
    shards_in,
)
from lightning_zero.checkpoint.storage import (
    CheckpointPath,
    check_shared,
    is_remote,
    local_path,
    locate,
    remove,
)
from lightning_zero.checkpoint.torch_file import write_torch_file
from lightning_zero.comm.control import Channel
from lightning_zero.engine.counting import full_checkpoint_bytes
from lightning_zero.engine.engine import Engine
from lightning_zero.health.together import failing_together, run_on_all_ranks
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.sizes import format_bytes
from lightning_zero.strategy.loading import is_download
from lightning_zero.tiers.memory import available_memory_bytes, local_world_size

__all__ = [
    "CheckpointType",
    "Saving",
    "SavingCallback",
    "ZeroCheckpointIO",
    "check_checkpoint_type",
    "why_sharded",
    "is_user_io",
]


CheckpointType = Literal["auto", "full", "sharded"]

_CHECKPOINT_TYPES = get_args(CheckpointType)
_SHARDED_NUMEL = 2**31  # parameter elements from which on "auto" is sharded


class SavingCallback(Callback):
    """Callback with one more hook."""

    def before_saving(self) -> None:
        """Called before the tensors of a checkpoint are gathered, on every rank."""


class Saving:
    """Chooses between full and sharded checkpoints, and writes sharded ones.

    `is_async`: writes them during training.
    """

    def __init__(self, checkpoint_type: CheckpointType, *, is_async: bool) -> None:
        check_checkpoint_type(checkpoint_type)
        if not isinstance(is_async, bool):
            raise TypeError(f"async_save must be True or False, got {is_async!r}.")
        if is_async and checkpoint_type == "full":
            raise ValueError(
                'async_save needs sharded checkpoints, got checkpoint="full"; use '
                'checkpoint="sharded", or lightning.pytorch.plugins.AsyncCheckpointIO.'
            )
        self._checkpoint_type = checkpoint_type
        self._is_async = is_async
        # Not a daemon thread: the process waits for it before it exits.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zero-save")
        self._in_flight: list[Future[None]] = []  # a save, and removals that follow it
        self._channel: Channel | None = None
        self._planned = SavePlanCache()  # over that channel
        # By source, for the next save; see [Note: Entries of a rank].
        self._returned: dict[str, CheckpointShard] = {}
        self._has_warned = False
        self._is_sharded: bool | None = None  # choice of "auto" for this run; None: not decided yet
        self._memory: dict[str, Tensor] = {}  # on the CPU; reused by the next asynchronous save

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has the settings, and its own saves.
        return partial(Saving, is_async=self._is_async), (self._checkpoint_type,)

    # ---------------------------------------------------------------- full or sharded

    def check(self, checkpoint_io: CheckpointIO | None) -> None:
        """Raises if a user's `CheckpointIO` is combined with sharded checkpoints."""
        if self._checkpoint_type == "sharded" and is_user_io(checkpoint_io):
            raise ValueError(
                f'checkpoint="sharded" does not use a CheckpointIO, got '
                f'{type(checkpoint_io).__name__}; use checkpoint="full", or leave out '
                "checkpoint_io."
            )

    def check_callbacks(self, trainer: Trainer, *, is_sharded: bool) -> None:
        """Raises for callbacks that would lose checkpoints. Call after their own set-up.

        Checkpoints would be lost on storage that is not shared between nodes. With `async_save`
        they would also be lost if `ModelCheckpoint` makes names unique by looking for existing
        checkpoints, while a save is still in flight.
        """
        callbacks = trainer.checkpoint_callbacks
        for callback in callbacks:
            check_shared(getattr(callback, "dirpath", None) or "", trainer.world_size)
        if self._is_async and is_sharded and any(_reuses_names(c) for c in callbacks):
            raise ValueError(
                "async_save needs a different name for each checkpoint of ModelCheckpoint, which "
                "looks for existing names before a save is complete; put {step} into its filename."
            )
        if self._is_async and any(getattr(c, "save_last", None) == "link" for c in callbacks):
            rank_zero_warn(
                'ModelCheckpoint(save_last="link") creates its link before async_save has '
                "completed the checkpoint: a job that is killed in between leaves a dangling link; "
                "use save_last=True."
            )

    def is_sharded(self, module: nn.Module, checkpoint_io: CheckpointIO | None) -> bool:
        """Whether a checkpoint is a sharded one; see `decide`."""
        if self._checkpoint_type != "auto":
            return self._checkpoint_type == "sharded"
        if is_user_io(checkpoint_io):
            return False
        if self._is_sharded is not None:
            return self._is_sharded
        return sum(p.numel() for p in module.parameters()) >= _SHARDED_NUMEL

    def decide(
        self, engine: Engine, resumed: _PATH | None = None, *, is_reported: bool = True
    ) -> None:
        """Decides between full and sharded for "auto" when a run begins. Collective: every rank.

        Checkpoints are sharded if parameters or optimizer states are offloaded, or if a full
        checkpoint takes more than half of the free CPU memory of rank 0. They are also sharded from
        2^31 parameter elements on, since one rank writes a full checkpoint. At a remote address
        neither kind replaces the other, so there a run keeps the kind of `resumed`, the checkpoint
        from which it resumes: it may write to that name again.
        """
        if self._checkpoint_type != "auto":
            return
        if resumed is not None and is_remote(resumed) and not is_download(resumed):
            wants_shards = is_sharded(locate(resumed))
        else:
            reason = why_sharded(engine)
            wants_shards = reason is not None
            if reason is not None and is_reported:
                rank_zero_info(
                    f'checkpoint="auto": checkpoints are sharded directories, since {reason}. '
                    "lightning_zero.load_from_checkpoint(Model, path) loads one; "
                    'checkpoint="full" writes one file.'
                )
        self._is_sharded = engine.comm.control.union([wants_shards])[0]

    # ---------------------------------------------------------------- entries and saves

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
        self._returned |= shards_in(state)
        return state

    def optimizer_state(self, optimizer: Optimizer, engine: Engine) -> dict[str, Any]:
        """The optimizer's entries; see `sharded_optimizer_state`. Collective: every rank."""
        state = sharded_optimizer_state(optimizer, engine)
        self._returned |= shards_in(state)
        return state

    def save(
        self,
        checkpoint: dict[str, Any],
        filepath: _PATH,
        engine: Engine,
        *,
        last_masters: dict[str, Tensor] | None = None,
        rank_state: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes `checkpoint`, made of entries of this object, as a directory. Collective.

        Args:
            checkpoint: Checkpoint as assembled by Lightning.
            filepath: Path of the checkpoint. Rank 0's is used.
            engine: Engine that holds the state.
            last_masters: After fit, the main parameters that rank 0 has kept.
            rank_state: State of this rank alone; see [Note: States of ranks]. None on no rank or
                on all.

        Raises:
            OSError, RuntimeError: The checkpoint, or the save in flight before it, could not be
                written. In the second case this checkpoint is written first. Raised on every rank;
                see `failing_together`.
        """
        failure: Exception | None = None
        if self._is_async and last_masters is None:  # else none is in flight; as on every rank
            gather = engine.comm.control.gather_objects
            try:
                with failing_together("complete the previous asynchronous save", gather=gather):
                    self.finish()
            except Exception as error:
                failure = error
                rank_zero_warn(
                    f"the previous asynchronous save failed ({failure}); its error is raised after "
                    f"{filepath} is written."
                )
        waits = failure is not None or not self._is_async
        self._write(checkpoint, filepath, engine, last_masters, rank_state, waits=waits)
        if failure is not None:
            raise failure

    def _write(
        self,
        checkpoint: dict[str, Any],
        filepath: _PATH,
        engine: Engine,
        last_masters: dict[str, Tensor] | None,
        rank_state: Mapping[str, Any] | None,
        *,
        waits: bool,
    ) -> None:
        is_closed = last_masters is not None
        shards, self._returned = self._returned, {}
        if "optimizer_states" in checkpoint:
            masters: Mapping[str, Any] = last_masters or {}
            if not is_closed:
                masters = sharded_masters(engine)
                shards |= shards_in(masters)
            if masters:
                checkpoint[MASTERS_KEY] = dict(masters)
        checkpoint[METADATA_KEY] = checkpoint.get(METADATA_KEY, {}) | describe_save(engine)
        if self._channel is None or not self._channel.is_open:
            self._channel, self._planned = engine.comm.control.open_channel(), SavePlanCache()
        channel = self._channel
        check_shared(filepath, channel.size)
        with channel.session():
            if rank_state is not None:
                shard = _add_rank_state(checkpoint, rank_state, channel)
                shards[shard.source] = shard
            save = ShardedSave.prepare(checkpoint, locate(filepath), shards, channel, self._planned)
            if waits or is_closed or not self._may_copy(save, engine):
                save.run()
                return
            pin = engine.device.type == "cuda"
            try:
                # Memory may be short on one rank only.
                copy_values = partial(save.snapshot, self._memory, pin=pin)
                run_on_all_ranks(copy_values, gather=channel.all_gather)
            except BaseException:
                self._memory.clear()
                raise
        assert not self._in_flight, "one at a time"
        self._in_flight.append(self._thread.submit(_run_in_session, save))

    def _may_copy(self, save: ShardedSave, engine: Engine) -> bool:
        """Whether every rank has the CPU memory for its copy. Collective."""
        held = sum(kept.nbytes for kept in self._memory.values())
        budget = available_memory_bytes() // (2 * local_world_size()) + held
        fits = bool(engine.comm.control.min_ints([budget - save.snapshot_bytes])[0] >= 0)
        if not fits:
            self._memory.clear()
            if not self._has_warned:
                self._has_warned = True
                rank_zero_warn(
                    f"async_save needs {save.snapshot_bytes} bytes of CPU memory on each rank, "
                    "more than half of the free memory on some rank: training waits for this "
                    "save instead."
                )
        return fits

    # ---------------------------------------------------------------- the save in flight

    def finish(self, *, warns: bool = False) -> None:
        """Waits for the save in flight, and raises its error, once.

        Args:
            warns: Warn of its error instead of raising it, because another error is being handled.
        """
        wait(self._in_flight)
        finished, self._in_flight = self._in_flight, []
        try:
            for future in finished:
                future.result()
        except Exception as error:
            if not warns:
                raise
            rank_zero_warn(f"the previous asynchronous save failed: {error}")

    def remove(self, filepath: _PATH) -> None:
        """Deletes a checkpoint once the save in flight has succeeded. On rank 0 only.

        Warns if the deletion fails: the save has succeeded, and other ranks have not failed.
        """
        path = locate(filepath)
        if not self._in_flight:
            _remove_or_warn(path)
            return
        save = self._in_flight[0]
        self._in_flight.append(
            self._thread.submit(lambda: None if save.exception() else _remove_or_warn(path))
        )

    def free(self) -> None:
        """Frees the memory that is kept from one save to the next. On every rank."""
        self._planned.clear()
        self._memory.clear()
        self._returned.clear()


def check_checkpoint_type(value: str) -> None:
    """Raises a ValueError for another value of the setting `checkpoint`."""
    if value not in _CHECKPOINT_TYPES:
        raise ValueError(f"checkpoint must be one of {_CHECKPOINT_TYPES}, got {value!r}.")


def why_sharded(engine: Engine) -> str | None:
    """Reason against a full checkpoint on this rank, as a clause; None: there is none. Local."""
    plans = [bucket.plan for bucket in engine.buckets]
    if sum(plan.layout.numel for plan in plans) >= _SHARDED_NUMEL:
        return f"the module has {_SHARDED_NUMEL} parameters or more"
    if any(tier is not Tier.DEVICE for p in plans for tier in (p.tiers.param, p.tiers.optim)):
        return "parameters or optimizer states are offloaded"
    needed, free = full_checkpoint_bytes(engine.buckets), available_memory_bytes()
    if engine.comm.rank == 0 and needed > free // 2:
        return f"a full one takes {format_bytes(needed)} of {format_bytes(free)} free CPU memory"
    return None


def is_user_io(checkpoint_io: CheckpointIO | None) -> bool:
    """Whether the user has given this plugin."""
    return type(checkpoint_io) not in (type(None), TorchCheckpointIO, ZeroCheckpointIO)


def _add_rank_state(
    checkpoint: dict[str, Any], rank_state: Mapping[str, Any], channel: Channel
) -> CheckpointShard:
    """Adds the states of ranks to `checkpoint`; returns this rank's own. Collective."""
    encoded, sizes = encode_on_all_ranks(rank_state, channel.all_gather)
    shard = rank_state_shard(encoded, sizes, channel.rank)
    add_rank_states(checkpoint, shard, sizes)
    return shard


def _run_in_session(save: ShardedSave) -> None:
    with save.channel.session():
        save.run()


def _remove_or_warn(path: CheckpointPath) -> None:
    try:
        remove(path)
    except Exception as error:  # the exceptions of remote storage are not known in advance
        rank_zero_warn(f"the old checkpoint {path} could not be deleted: {error}")


def _reuses_names(callback: Checkpoint) -> bool:
    """Whether `callback` keeps several checkpoints under one name with a counter."""
    return (
        isinstance(callback, ModelCheckpoint)
        and callback.save_top_k not in (0, 1)
        and bool(callback.filename)
        and "{" not in str(callback.filename)
    )


# -------------------------------------------------------------------- full checkpoints, and loading


class ZeroCheckpointIO(TorchCheckpointIO):
    """Writes a full checkpoint atomically, without a copy in memory, and checks it when reading.

    The file has the format of `torch.save`. Remote storage is written in the same way. Code other
    than `ZeroStrategy` reads it through Lightning.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None
    ) -> None:
        if storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        write_torch_file(checkpoint, locate(path))

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
