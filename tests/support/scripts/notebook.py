"""What a notebook does: python notebook.py STRATEGY FOLDER; saves the weights of this process."""

import sys

sys.ps1 = ">>> "  # Lightning sees an interactive session

import numpy as np  # noqa: E402
from lightning.pytorch import seed_everything  # noqa: E402

import lightning_zero  # noqa: E402, F401
from tests.support.fitting import arrays, make_trainer  # noqa: E402
from tests.support.models import GPTModule  # noqa: E402

seed_everything(7, verbose=False)
module = GPTModule(ranks=2)
make_trainer(sys.argv[1], devices=2).fit(module)
np.savez(f"{sys.argv[2]}/notebook.npz", **arrays(module.state_dict()))
