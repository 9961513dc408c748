"""Hydra's config groups, for any application: `hydra.searchpath: [pkg://lightning_zero.conf]`.

Importing it makes known what the files refer to, for an application that has them in a folder.
"""

from lightning_zero.strategy.schema import register

register()
