"""What the plan of a sharded save costs rank 0, by the number of ranks.

    python tests/benchmarks/save_plan.py --ranks 8 64 512 4096

One process makes the plan of every rank, one after the other, for a decoder with the shapes of
Llama 2 70B, AdamW's states and a master for each parameter; pickles it as ranks send it; and does
what rank 0 does with all of them. No values are read or written, and nothing is sent.
The package is taken from PYTHONPATH where that has one, else from this repository.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from lightning_zero import ZeroConfig
from lightning_zero.checkpoint.checkpoint_shard import CheckpointShard
from lightning_zero.checkpoint.dcp_metadata import gc_paused
from lightning_zero.checkpoint.dcp_writer import merged, rank_file
from lightning_zero.layout.plan import Plan, make_plan
from lightning_zero.planner.shapes import SHAPES, Decoder

ENTRIES = (
    "state_dict.{}",
    "master.{}",
    "optimizer_0.state.{}.exp_avg",
    "optimizer_0.state.{}.exp_avg_sq",
)
COLUMNS = ("items", "sent", "own plan", "unpickle", "merge", "pickle", "first", "later")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--model", default="llama2_70b", choices=SHAPES)
    args = parser.parse_args()
    with torch.device("meta"):
        module = Decoder(SHAPES[args.model])
    print(f"{args.model}: seconds on rank 0")
    print(f"{'ranks':>6}", *(f"{column:>9}" for column in COLUMNS))
    for num_ranks in args.ranks:
        plan = make_plan(module, ZeroConfig(stage=3), world_size=num_ranks)
        print(f"{num_ranks:6}", *_measured(plan), flush=True)


def _measured(plan: Plan) -> Iterator[str]:
    seconds = dict.fromkeys(COLUMNS, 0.0)

    @contextmanager
    def timed(column: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[column] += time.perf_counter() - start

    first, everyone, sent_bytes = DefaultSavePlanner(), [], 0
    for rank in range(plan.world_size):
        planner = first if rank == 0 else DefaultSavePlanner()
        planner.set_up_planner(_shards(plan, rank), is_coordinator=rank == 0)
        start = time.perf_counter()
        own = planner.create_local_plan()
        if rank == 0:
            seconds["own plan"] = time.perf_counter() - start
            everyone.append((own, _written(rank, own)))
            continue
        sent = pickle.dumps((own, _written(rank, own)))
        sent_bytes += len(sent)
        with timed("unpickle"), gc_paused():
            everyone.append(pickle.loads(sent))
    with timed("merge"), gc_paused():
        metadata = merged(first, everyone)
    with timed("pickle"), gc_paused():
        content = pickle.dumps(metadata)
    with timed("later"):
        assert first.create_local_plan() == everyone[0][0]
        _write(content)
    parts = ("own plan", "unpickle", "merge", "pickle")
    seconds["first"] = sum(seconds[each] for each in parts)
    items = sum(len(own.items) for own, _ in everyone)
    yield from (f"{items:9}", f"{sent_bytes / 1e6:6.1f} MB")
    yield from (f"{seconds[column]:9.2f}" for column in COLUMNS[2:])


def _write(content: bytes) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _shards(plan: Plan, rank: int) -> dict[str, CheckpointShard]:
    found = {}
    for bucket in plan.buckets:
        for slot in bucket.layout.slots:
            owned = bucket.layout.owned(slot, rank)
            for entry in ENTRIES:
                name = entry.format(slot.name)
                found[name] = CheckpointShard.of(
                    name, slot.shape, torch.float32, owned, _never_read
                )
    return found


def _written(rank: int, plan: SavePlan) -> list[WriteResult]:
    results, start = [], 0
    for item in plan.items:
        assert item.tensor_data is not None
        length = 4 * item.tensor_data.chunk.sizes.numel()
        info = _StorageInfo(rank_file(rank), start, length)
        results.append(WriteResult(item.index, length, info))
        start += length
    return results


_never_read: Callable[[int, int], torch.Tensor] = lambda start, stop: torch.empty(0)  # noqa: E731


if __name__ == "__main__":
    main()
