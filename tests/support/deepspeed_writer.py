"""Trains under DeepSpeed on this rank and saves its checkpoint: python -m ... SETTINGS FOLDER.

`full.pt` in the same folder has the full weights, extracted by DeepSpeed itself.
"""

import ast
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from tests.support.deepspeed_format import TrainedModule


def main(settings, folder):
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    module = TrainedModule()
    optimizer = torch.optim.AdamW(module.groups(), lr=1e-2, eps=1e-5)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config={**config, **settings}
    )
    rank = torch.distributed.get_rank()
    for step in range(3):
        engine.backward(_Loss(engine)(step, rank))
        engine.step()
    engine.save_checkpoint(folder, tag="step7", client_state={"epoch": 4})
    if rank == 0 and settings["zero_optimization"]["stage"]:
        full = get_fp32_state_dict_from_zero_checkpoint(folder)
        torch.save({k: v.clone() for k, v in full.items()}, Path(folder) / "full.pt")


class _Loss:
    """The module's loss, computed through DeepSpeed's engine, which all-gathers in stage 3."""

    def __init__(self, engine):
        self.engine = engine

    def __call__(self, step, rank):
        return TrainedModule.loss(self.engine, step, rank)


if __name__ == "__main__":
    main(ast.literal_eval(sys.argv[1]), sys.argv[2])
