"""States of one rank in a checkpoint: its random generators and its data loaders.

[Note: States of ranks] They differ between ranks, and no other rank can use them. Each rank encodes
its own as bytes of `torch.save`. Together they are one 1-D tensor of uint8; the entry
`METADATA_KEY` has the number of bytes of each rank. To a sharded checkpoint every rank writes its
range, and no rank gathers them; rank 0 gathers them for a full one. A rank reads only its own range
of either, and checksums and atomic replacement are those of all tensors. They are loaded with the
`weights_only` of the checkpoint.
"""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_zero.checkpoint.checkpoint_shard import CheckpointShard
from lightning_zero.checkpoint.states import METADATA_KEY, RANK_STATES_KEY
from lightning_zero.comm.control import GlooControlPlane
from lightning_zero.health.together import run_on_all_ranks
from lightning_zero.tensors.lazy import read_flat

__all__ = [
    "add_rank_states",
    "encode_on_all_ranks",
    "encode_state",
    "gather_rank_states",
    "random_state",
    "rank_state_shard",
    "read_rank_state",
    "saved_num_ranks",
    "set_random_state",
]

_MAX_GATHERED_BYTES = 2**30
_SIZES_KEY = "rank_state_bytes"  # in the entry `METADATA_KEY`: number of bytes of every rank


def random_state(device: torch.device) -> dict[str, Any]:
    """States of the generators of torch, NumPy and Python that this process draws from. Local.

    `device`: device of this rank; with CUDA, the state of its generator, too.
    """
    of_numpy: dict[str, Any] = np.random.get_state(legacy=False)
    inner = of_numpy["state"]
    if "key" in inner:  # an array, which weights_only=True refuses; other generators have numbers
        of_numpy = of_numpy | {
            "state": inner | {"key": torch.from_numpy(inner["key"].astype("i8"))}
        }
    version, numbers, last_gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": of_numpy,
        "python": (version, torch.tensor(numbers, dtype=torch.int64), last_gauss),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: Mapping[str, Any], device: torch.device) -> None:
    """Restores what `random_state` returned. Without CUDA now or then, its generator stays."""
    torch.set_rng_state(states["torch"])
    of_numpy = states["numpy"]
    inner = of_numpy["state"]
    if "key" in inner:
        inner = inner | {"key": inner["key"].numpy().astype(np.uint32)}
    np.random.set_state(of_numpy | {"state": inner})
    version, numbers, last_gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), last_gauss))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def encode_state(state: Mapping[str, Any]) -> Tensor:
    """The bytes of `state`: 1-D, uint8, on the CPU."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def encode_on_all_ranks(
    state: Mapping[str, Any], gather: Callable[[Any], list[Any]]
) -> tuple[Tensor, list[int]]:
    """The bytes of this rank's `state`, and the number of bytes of every rank. Collective.

    `gather`: returns every rank's object. Every rank raises if a state cannot be pickled.
    """
    encoded: list[Tensor] = []

    def encode() -> int:
        encoded.append(encode_state(state))
        return encoded[0].numel()

    sizes = run_on_all_ranks(encode, gather=gather)
    return encoded[0], sizes


def add_rank_states(checkpoint: dict[str, Any], states: Tensor, sizes: Sequence[int]) -> None:
    """Adds the states of all ranks to `checkpoint`: their bytes, or a stand-in for the shards."""
    checkpoint[RANK_STATES_KEY] = states
    checkpoint[METADATA_KEY] = checkpoint.get(METADATA_KEY, {}) | {_SIZES_KEY: list(sizes)}


def gather_rank_states(
    checkpoint: dict[str, Any], state: Mapping[str, Any], control: GlooControlPlane
) -> None:
    """Adds the states of all ranks to rank 0's full `checkpoint`. Collective.

    `state`: that of this rank. Every rank raises if a state cannot be pickled. States that would
    fill the memory of rank 0 are left out, with a warning.
    """
    encoded, sizes = encode_on_all_ranks(state, control.gather_objects)
    if max(sizes) * len(sizes) > _MAX_GATHERED_BYTES:  # rank 0 receives buffers of equal size
        if control.rank == 0:
            warnings.warn(
                f"the full checkpoint is saved without the states of its {len(sizes)} ranks, of up "
                f'to {max(sizes)} bytes each; ZeroStrategy(checkpoint="sharded") saves them.',
                stacklevel=2,
            )
        return
    if everyone := control.collect_objects(encoded):
        add_rank_states(checkpoint, torch.cat(everyone), sizes)


def rank_state_shard(encoded: Tensor, sizes: Sequence[int], rank: int) -> CheckpointShard:
    """The part of all ranks' states that `rank` writes; `sizes` are the bytes of every rank."""
    start, stop = _range_of(rank, sizes)

    def read(first: int, last: int) -> Tensor:
        return encoded[first - start : last - start]

    owned = range(start, stop)
    return CheckpointShard.of("states of ranks", (sum(sizes),), torch.uint8, owned, read)


def saved_num_ranks(checkpoint: Mapping[str, Any]) -> int:
    """Number of ranks whose states an opened checkpoint has; 0 if it has none."""
    note = checkpoint.get(METADATA_KEY)
    sizes = note.get(_SIZES_KEY, ()) if isinstance(note, Mapping) else ()
    return len(sizes) if RANK_STATES_KEY in checkpoint else 0


def read_rank_state(
    checkpoint: Mapping[str, Any], rank: int, *, weights_only: bool | None = None
) -> dict[str, Any]:
    """The state of `rank` in an opened checkpoint that has one. Local.

    Raises:
        ValueError: The numbers of bytes do not match the tensor.
        pickle.UnpicklingError: It has classes that `weights_only` refuses.
    """
    states, sizes = checkpoint[RANK_STATES_KEY], checkpoint[METADATA_KEY][_SIZES_KEY]
    if sum(sizes) != states.numel():
        raise ValueError(
            f"the checkpoint has {states.numel()} bytes of states of ranks, expected "
            f"{sum(sizes)}; use another checkpoint."
        )
    encoded = read_flat(states, *_range_of(rank, sizes))
    file = io.BytesIO(encoded.numpy().tobytes())
    decoded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only)
    return decoded


def _range_of(rank: int, sizes: Sequence[int]) -> tuple[int, int]:
    ends = [0, *accumulate(sizes)]
    return ends[rank], ends[rank + 1]
