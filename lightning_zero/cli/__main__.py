"""`python -m lightning_zero.cli`: the command `lightning-zero` without its script."""

import sys

from lightning_zero.cli import main

sys.exit(main())
