"""Trains the tests' GPT: python train.py STRATEGY DEVICES FOLDER; each rank saves what it saw."""

import sys

import numpy as np
from lightning.pytorch import seed_everything

import lightning_zero  # noqa: F401
from tests.support.fitting import arrays, make_trainer
from tests.support.models import GPTModule


def main() -> None:
    strategy, devices, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    seed_everything(7, verbose=False)
    module = GPTModule(ranks=2)
    trainer = make_trainer(strategy, devices=devices)
    trainer.fit(module)
    state = arrays(module.state_dict())
    np.savez(f"{folder}/rank{trainer.global_rank}.npz", losses=module.losses, **state)


if __name__ == "__main__":
    main()
