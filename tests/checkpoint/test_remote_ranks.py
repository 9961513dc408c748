"""Checkpoints on remote storage through fsspec: saved, resumed, inspected, exported."""

from __future__ import annotations

import os
from functools import partial
from urllib.request import Request, urlopen

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

import lightning_zero
from lightning_zero import Engine, ZeroConfig, open_checkpoint
from lightning_zero.checkpoint.checkpoint_shard import CheckpointShard
from lightning_zero.checkpoint.dcp_writer import ShardedSave
from lightning_zero.checkpoint.source import find_damage
from lightning_zero.checkpoint.storage import RemotePath
from lightning_zero.checkpoint.torch_file import write_torch_file
from lightning_zero.cli import main
from lightning_zero.comm.control import Channel
from tests.support import store
from tests.support.fitting import make_trainer, settings
from tests.support.models import GPTModule, MLPModule
from tests.support.ranks import RankError, run_ranks
from tests.support.store import Store


def _fit(factory, spec, ckpt_path=None, **options):
    seed_everything(7, verbose=False)
    module = factory()
    trainer = make_trainer(spec, **options)
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer, module


def _assert_equal(state, other):
    assert all(torch.equal(value, other[name]) for name, value in state.items())


# --------------------------------------------------------------------------- one process


@pytest.mark.default_cases("sharded")
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_one_process_keeps_its_checkpoints_at_an_address(form):
    run_ranks(1, _train_at_an_address, form, has_group=False)


def _train_at_an_address(rank, world_size, form):
    spec = settings(3, checkpoint=form)
    callback = ModelCheckpoint("memory://run", save_last=True)
    factory = partial(GPTModule, ranks=1, is_tied=True, num_batches=2)
    options = {"enable_checkpointing": True, "callbacks": [callback]}
    _, module = _fit(factory, spec, max_epochs=2, **options)
    path = callback.best_model_path
    assert path.startswith("memory://run/epoch=1")
    assert len(fsspec.filesystem("memory").ls("/run")) == 2  # previous ones are deleted
    assert find_damage(path) == []
    assert not os.listdir()

    trainer, resumed = _fit(factory, spec, ckpt_path="memory://run/last.ckpt", max_epochs=3)
    _, straight = _fit(factory, spec, max_epochs=3)
    assert trainer.global_step == 6
    _assert_equal(resumed.state_dict(), straight.state_dict())

    loaded = factory()
    lightning_zero.load_weights(loaded, path)
    _assert_equal(loaded.state_dict(), module.state_dict())
    again = lightning_zero.load_from_checkpoint(GPTModule, path, ranks=1, is_tied=True)
    _assert_equal(again.state_dict(), module.state_dict())


@pytest.mark.default_cases("full")
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_run_resumed_at_an_address_keeps_its_kind_of_checkpoint(form):
    run_ranks(1, _resume_and_keep_kind, form, has_group=False)


def _resume_and_keep_kind(rank, world_size, form):
    factory, path = partial(MLPModule, ranks=1), "memory://run/last.ckpt"
    first, _ = _fit(factory, settings(2, checkpoint=form), limit_train_batches=1)
    first.save_checkpoint(path)
    other = {"offload_optimizer": "cpu"} if form == "full" else {}
    spec = settings(2, checkpoint="auto", **other)
    trainer, _ = _fit(factory, spec, path, max_epochs=2, limit_train_batches=1)
    trainer.save_checkpoint(path)
    assert open_checkpoint(path)["global_step"] == 2


# --------------------------------------------------------------------------- several ranks


@pytest.mark.parametrize("form", ["full", pytest.param("sharded", marks=pytest.mark.slow)])
def test_ranks_read_their_part_of_what_is_stored(form):
    run_ranks(2, _read_parts, form, has_group=False)


class Wide(MLPModule):
    def __init__(self, **options):
        super().__init__(**options)
        self.wide = nn.Linear(2**10, 2**10)  # 4 MiB


def _read_parts(rank, world_size, form):
    store.register()
    factory = partial(Wide, ranks=2)
    trainer, module = _fit(factory, settings(3, checkpoint=form), limit_train_batches=1)
    trainer.save_checkpoint("store://run/a.ckpt", weights_only=True)
    held = factory()
    engine = Engine(held, [torch.optim.SGD(held.parameters())], ZeroConfig(stage=3))
    nbytes = sum(p.nbytes for p in module.parameters())
    Store.num_read = 0
    lightning_zero.load_weights(held, "store://run/a.ckpt", verify=False)
    assert nbytes / 2 <= Store.num_read < nbytes / 2 + 2**19
    engine.close()
    _assert_equal(held.state_dict(), module.state_dict())


class SavingTwice(Callback):
    """Saves after steps 1, 2 and 3; the second cannot be written on the last rank."""

    def __init__(self, broken):
        self.broken = broken

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == 2:
            Store.broken = self.broken
            with pytest.raises(OSError, match="does not answer"):
                trainer.save_checkpoint("store://run/last.ckpt")
            Store.broken = ""
            assert open_checkpoint("store://run/last.ckpt")["global_step"] == 1
            assert find_damage("store://run/last.ckpt") == []
        else:
            trainer.save_checkpoint("store://run/last.ckpt")


@pytest.mark.parametrize(
    ("form", "broken"),
    [
        ("sharded", "__1_0.distcp"),
        pytest.param("sharded", ".metadata", marks=pytest.mark.slow),
        pytest.param("full", "last.ckpt", marks=pytest.mark.slow),
    ],
)
def test_a_save_that_fails_leaves_the_one_before_at_its_address(form, broken, tmp_path):
    run_ranks(2, _fail_to_save, form, broken, str(tmp_path), has_group=False)


def _fail_to_save(rank, world_size, form, broken, folder):
    os.chdir(folder)
    store.register()
    spec = settings(2, checkpoint=form)
    options = {"limit_train_batches": 3, "callbacks": [SavingTwice(broken)]}
    trainer, _ = _fit(partial(MLPModule, ranks=2), spec, **options)
    opened = open_checkpoint("store://run/last.ckpt")
    assert opened["global_step"] == 3
    if form == "sharded" and rank == 0:
        assert sorted(os.listdir("store/run/last.ckpt"))[:2] == [".metadata", "meta.pt"]
        assert len(os.listdir("store/run/last.ckpt")) == 3  # files of the failed save are deleted
    trainer.strategy.barrier()


@pytest.mark.slow
def test_torch_reads_what_is_at_an_address(tmp_path):
    run_ranks(2, _save_for_torch, str(tmp_path), has_group=False)
    reader = FileSystemReader(tmp_path / "store/run/a.ckpt")
    weight = torch.zeros(13, 8)
    dcp.load({"state_dict": {"net.0.weight": weight}}, storage_reader=reader, no_dist=True)
    assert torch.equal(weight, torch.load(tmp_path / "weights.pt")["net.0.weight"])
    assert torch.load(tmp_path / "store/run/a.ckpt/meta.pt")["global_step"] == 4


def _save_for_torch(rank, world_size, folder):
    os.chdir(folder)
    store.register()
    spec = settings(3, checkpoint="sharded", async_save=True, offload_optimizer="cpu")
    factory = partial(MLPModule, ranks=2)
    trainer, module = _fit(factory, spec, callbacks=[SavingAtTheEnd()])
    if rank == 0:
        torch.save(module.state_dict(), "weights.pt")
    trainer.strategy.barrier()


class SavingAtTheEnd(Callback):
    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint("store://run/a.ckpt")
        trainer.strategy.finish_saving()


@pytest.mark.parametrize("form", ["full", pytest.param("sharded", marks=pytest.mark.slow)])
def test_the_memory_of_one_process_is_refused_to_several_ranks(form):
    with pytest.raises(
        RankError, match="is in the memory of one process, but 2 ranks are separate"
    ):
        run_ranks(2, _resume_from_memory, form, has_group=False)


def _resume_from_memory(rank, world_size, form):
    trainer = make_trainer(settings(1, checkpoint=form))
    with pytest.raises(ValueError, match="in the memory of one process, but 2 ranks are separate"):
        trainer.fit(MLPModule(ranks=2), ckpt_path="memory://a.ckpt")
    trainer = make_trainer(settings(1, checkpoint=form))
    trainer.fit(MLPModule(ranks=2))
    with pytest.raises((ValueError, RuntimeError), match="in the memory of one process"):
        trainer.save_checkpoint("memory://a.ckpt")
    callbacks = [ModelCheckpoint("memory://run")]
    trainer = make_trainer(
        settings(1, checkpoint=form), callbacks=callbacks, enable_checkpointing=True
    )
    trainer.fit(MLPModule(ranks=2))


# --------------------------------------------------------------------------- a local S3 server


@pytest.fixture
def bucket(monkeypatch):
    pytest.importorskip("s3fs", reason="needs s3fs")
    server = pytest.importorskip("moto.server", reason="needs moto[server]").ThreadedMotoServer(
        port=0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
    yield variables
    urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST"))  # the process keeps it
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # of this address
    server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_run_goes_on_from_s3(form, bucket):
    run_ranks(2, _train_on_s3, form, bucket, has_group=False, timeout_s=240)
    address = "s3://bucket/run/last.ckpt"
    assert find_damage(address) == []
    assert main(["export", address, "s3://bucket/weights.safetensors"]) == 0
    exported = open_checkpoint("s3://bucket/weights.safetensors")["state_dict"]
    saved = open_checkpoint(address)["state_dict"]
    assert all(torch.equal(value.clone(), exported[name].clone()) for name, value in saved.items())


def _train_on_s3(rank, world_size, form, variables):
    os.environ |= variables
    factory = partial(Wide, ranks=2, optimizer="adam")
    spec = settings(3, checkpoint=form)

    def callbacks():
        return [ModelCheckpoint("s3://bucket/run", save_last=True)]

    _fit(factory, spec, max_epochs=2, enable_checkpointing=True, callbacks=callbacks())
    trainer, resumed = _fit(
        factory,
        spec,
        ckpt_path="s3://bucket/run/last.ckpt",
        max_epochs=3,
        enable_checkpointing=True,
        callbacks=callbacks(),
    )
    _, straight = _fit(factory, spec, max_epochs=3)
    _assert_equal(resumed.state_dict(), straight.state_dict())
    path = RemotePath("s3://bucket/run/last.ckpt")
    with pytest.raises(RuntimeError, match="on the way"), path.atomic_write(3) as file:  # noqa: PT012
        file.write(bytes(2**25))
        raise RuntimeError("on the way")
    trainer.strategy.barrier()
    assert open_checkpoint("s3://bucket/run/last.ckpt")["global_step"] == 12


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_kill_before_any_request_to_s3_leaves_the_old_or_the_new_checkpoint(form, bucket):
    address, there = "s3://bucket/run/last.ckpt", 0
    run_ranks(1, _save_until_request, form, address, there, 10**6, bucket, has_group=False)
    for last in range(200):
        new = last + 1
        has_ended = _has_saved(form, address, new, last, bucket)
        assert find_damage(address) == []
        checkpoint = open_checkpoint(address)
        assert checkpoint["global_step"] in ((new,) if has_ended else (there, new))
        there = checkpoint["global_step"]
        assert checkpoint["state_dict"]["w"].clone().tolist() == [float(there)] * 1000
        if has_ended:
            break
    assert last >= 4  # requests were counted


def _has_saved(*args):
    try:
        run_ranks(1, _save_until_request, *args, has_group=False)
    except RankError as error:
        if "died with exit code 9" not in str(error):
            raise
        return False
    return True


def _save_until_request(rank, world_size, form, address, number, last, variables):
    """Saves weights with the value `number`; dies before request `last`, counted from 0."""
    os.environ |= variables
    from aiobotocore.client import AioBaseClient

    call, count = AioBaseClient._make_api_call, 0

    async def counted(*args, **options):
        nonlocal count
        if count == last:
            os._exit(9)
        count += 1
        return await call(*args, **options)

    AioBaseClient._make_api_call = counted
    weights = torch.full((1000,), float(number))
    if form == "full":
        content = {"global_step": number, "state_dict": {"w": weights}}
        write_torch_file(content, RemotePath(address))
        return
    read = partial(_part_of, weights)
    shard = CheckpointShard.of("w", weights.shape, weights.dtype, range(1000), read)
    content = {"global_step": number, "state_dict": {"w": shard}}
    ShardedSave.prepare(content, RemotePath(address), {"w": shard}, Channel(0, 1, None)).run()


def _part_of(weights, start, stop):
    return weights[start:stop]
