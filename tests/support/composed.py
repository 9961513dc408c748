"""Configurations composed from conf/."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir

import lightning_zero.conf  # noqa: F401  # registers what the files refer to

__all__ = ["CONF", "composed"]

CONF = Path(__file__).parents[2] / "conf"


def composed(*overrides, name="train"):
    """The configuration of `name` with these overrides, as without a job."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose(name, overrides=list(overrides))
