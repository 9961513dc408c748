"""`CheckpointShard` with torch's own planners."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor, zeros

from lightning_zero.checkpoint.checkpoint_shard import CheckpointShard
from tests.support.warm import run_ranks

SHAPES = {"matrix": (5, 7), "cube": (3, 2, 5), "vector": (3,), "scalar": (), "none": (0, 4)}


def values(shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 1


def shard(full, rank, world_size, name="weight"):
    numel = full.numel()
    owned = range(numel * rank // world_size, numel * (rank + 1) // world_size)
    flat = full.reshape(-1)
    return CheckpointShard.of(name, full.shape, full.dtype, owned, lambda a, b: flat[a:b])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("dcp")
    run_ranks(3, _save, str(path))
    return path


def _save(rank, world_size, path):
    dcp.save({n: shard(values(s), rank, world_size) for n, s in SHAPES.items()}, checkpoint_id=path)


def test_torch_reads_full_tensors_from_flat_ranges(saved):
    state = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    dcp.load(state, checkpoint_id=saved, no_dist=True)
    for name, shape in SHAPES.items():
        assert torch.equal(state[name], values(shape)), name


def test_torch_reads_flat_ranges_into_flat_ranges_of_another_world_size(saved):
    for world_size in (1, 2, 4):
        for rank in range(world_size):
            targets = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
            state = {n: shard(t, rank, world_size) for n, t in targets.items()}
            dcp.load(state, checkpoint_id=saved, no_dist=True)
            for name, target in targets.items():
                owned = state[name].owned
                expected = torch.zeros_like(target).view(-1)
                expected[owned.start : owned.stop] = values(SHAPES[name]).view(-1)[
                    owned.start : owned.stop
                ]
                assert torch.equal(target.view(-1), expected), (name, rank, world_size)


def test_dtensors_and_flat_ranges_read_each_other(saved, tmp_path):
    run_ranks(2, _exchange_with_dtensors, str(saved), str(tmp_path))


def _exchange_with_dtensors(rank, world_size, saved, path):
    mesh = init_device_mesh("cpu", (world_size,))
    state = {
        "matrix": zeros(5, 7, device_mesh=mesh, placements=[Shard(0)]),
        "cube": zeros(3, 2, 5, device_mesh=mesh, placements=[Shard(2)]),
    }
    dcp.load(state, checkpoint_id=saved)
    for name, value in state.items():
        assert torch.equal(value.full_tensor(), values(SHAPES[name])), name
    full = {"matrix": values((5, 7)) * 2, "cube": values((3, 2, 5)) * 2}
    dcp.save(
        {
            "matrix": distribute_tensor(full["matrix"], mesh, [Shard(1)]),
            "cube": distribute_tensor(full["cube"], mesh, [Shard(0)]),
        },
        checkpoint_id=path,
    )
    targets = {name: torch.zeros_like(value) for name, value in full.items()}
    dcp.load({n: shard(t, rank, world_size) for n, t in targets.items()}, checkpoint_id=path)
    for name, target in targets.items():
        dist.all_reduce(target)
        assert torch.equal(target, full[name]), name


def test_only_the_values_of_a_box_are_read_when_it_is_written():
    reads = []

    def read(start, stop):
        reads.append((start, stop))
        return values((5, 7)).view(-1)[start:stop]

    one = CheckpointShard.of("weight", (5, 7), torch.float32, range(3, 17), read)
    items = one.__create_write_items__("weight", one)
    assert not reads
    assert [tuple(item.index.offset) for item in items] == [(0, 3), (1, 0), (2, 0)]
    box = one.__get_tensor_shard__(items[1].index)
    assert reads == [(7, 14)]
    assert torch.equal(box, values((5, 7))[1:2])


def test_it_can_be_renamed_copied_and_cast():
    one = shard(values((4, 4)), 0, 2)
    for cast in (one.half(), one.to(torch.float16), one.cpu().to("cpu", torch.float16)):
        assert isinstance(cast, CheckpointShard)
        assert cast.dtype == torch.float16
        assert cast.read(0, 3).tolist() == [1.0, 2.0, 3.0]
    for copied in (one.clone(), one.detach(), one.float(), copy.deepcopy({"x": one})["x"]):
        assert isinstance(copied, CheckpointShard)
        assert copied.source == "weight"
        assert copied.owned == one.owned


def test_other_operations_and_pickling_are_errors_that_say_what_to_do():
    one = shard(values((4, 4)), 0, 2)
    with pytest.raises(RuntimeError, match='checkpoint="full"'):
        one + 1
    with pytest.raises(RuntimeError, match="needs all values"):
        one.norm()
    with pytest.raises(TypeError, match="weight is a shard"):
        torch.save({"x": (one,)}, io.BytesIO())
    assert "weight" in repr(one)
