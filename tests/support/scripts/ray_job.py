"""Fits on a Ray cluster of two nodes on this machine; writes what they gave to `result.json`."""

import json
import os
import signal
import sys
import time
from pathlib import Path

os.environ |= {"RAY_TRAIN_V2_ENABLED": "1", "RAY_DEDUP_LOGS": "0"}

import ray
import ray.train
from lightning.pytorch import Callback, Trainer, seed_everything
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import (
    RayDDPStrategy,
    RayLightningEnvironment,
    RayTrainReportCallback,
    prepare_trainer,
)
from ray.train.torch import TorchTrainer

STORAGE = Path(sys.argv[1]).resolve()


def train(config):
    from lightning_zero.ray import RayZeroStrategy
    from tests.support.models import MLPModule

    class Kill(Callback):
        """Kills the last worker in the second epoch, once."""

        def on_train_batch_end(self, trainer, *args):
            mark = STORAGE / "killed"
            is_last = trainer.global_rank == trainer.world_size - 1
            if config.get("kills") and trainer.current_epoch == 1 and is_last and not mark.exists():
                time.sleep(5)  # Ray has seen the report of the first epoch
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    seed_everything(7, verbose=False)
    strategy = (
        RayDDPStrategy()
        if config["stage"] is None
        else RayZeroStrategy(config["stage"], checkpoint=config["checkpoint"])
    )
    trainer = prepare_trainer(
        Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices="auto",
            max_epochs=config["epochs"],
            plugins=[RayLightningEnvironment()] if config["stage"] is None else [],
            callbacks=[Kill(), RayTrainReportCallback()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    )
    module = MLPModule(ranks=trainer.world_size, num_batches=3)
    newest = ray.train.get_checkpoint()
    if newest is None:
        trainer.fit(module)
    else:
        with newest.as_directory() as folder:
            path = Path(folder, RayTrainReportCallback.CHECKPOINT_NAME)
            trainer.fit(module, ckpt_path=str(path), weights_only=False)
    if trainer.global_rank == 0:
        values = {name: value.tolist() for name, value in module.state_dict().items()}
        nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        found = {
            "values": values,
            "num_nodes": len(nodes),
            "num_ranks": trainer.world_size,
            "resumed": newest is not None,
            "losses": module.losses,
        }
        (STORAGE / f"{config['name']}.json").write_text(json.dumps(found))


def fit(name, *, num_workers, run=None, **config):
    TorchTrainer(
        train,
        train_loop_config={"name": name, "stage": 3, "checkpoint": "full", "epochs": 2} | config,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(
            name=run or name,
            storage_path=str(STORAGE / "runs"),
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()


if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    cluster.connect()
    fit("plain", num_workers=3, stage=None)
    fit("killed", num_workers=3, checkpoint="sharded", kills=True)
    fit("fewer", num_workers=2, checkpoint="sharded", epochs=3, run="killed")
    ray.shutdown()
    cluster.shutdown()
