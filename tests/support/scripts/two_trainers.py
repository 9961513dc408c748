"""Fits with one Trainer, then with another: python two_trainers.py STRATEGY DEVICES DEVICES."""

import sys

import lightning_zero  # noqa: F401
from tests.support.fitting import make_trainer
from tests.support.models import MLPModule

if __name__ == "__main__":
    for devices in map(int, sys.argv[2:]):
        make_trainer(sys.argv[1], devices=devices).fit(MLPModule(ranks=devices))
