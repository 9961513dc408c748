"""The group `extras` of `conf`: warnings, tags and the printed settings of a run."""

from __future__ import annotations

import warnings

from omegaconf import DictConfig, OmegaConf

from lightning_zero.launch.schema import process_rank

__all__ = ["apply_extras"]


def apply_extras(config: DictConfig) -> None:
    """Applies `config.extras`; call it first in `main`.

    - `ignore_warnings`: hide Python's warnings.
    - `enforce_tags`: refuse a run whose `tags` are empty.
    - `print_config`: print the composed settings on rank 0, with references unresolved.

    Raises:
        ValueError: `enforce_tags` is set, and there are no tags.
    """
    extras = config.get("extras") or {}
    if extras.get("ignore_warnings"):
        warnings.filterwarnings("ignore")
    if extras.get("enforce_tags") and not config.get("tags"):
        raise ValueError(
            "extras.enforce_tags needs tags, got none; give tags=[NAME], or "
            "extras.enforce_tags=false."
        )
    if extras.get("print_config") and process_rank() == 0:
        print(OmegaConf.to_yaml(config))
