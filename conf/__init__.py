"""Hydra's config groups, for any application: `hydra.searchpath: [pkg://lightning_zero.conf]`."""
