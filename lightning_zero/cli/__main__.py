"""`python -m lightning_zero.cli`, where the command `lightning-zero` is not installed."""

import sys

from lightning_zero.cli import main

sys.exit(main())
