"""`python -m lightning_zero`: the command `lightning-zero`, for torchrun and srun."""

import sys

from lightning_zero.cli import main

if __name__ == "__main__":
    sys.exit(main())
