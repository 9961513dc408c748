"""Steps the user's optimizers on shards. Imports core and all below it.

    adamw8bit     AdamW with moments of 8 bits, for users; beside it lion8bit and sgd8bit
    optimizer8bit base of optimizers with moments of 8 bits
    dynamic8      numbers of 8 bits, in blocks
    blocks        optimizers whose states have numbers for blocks of elements
    known         classes of optimizers that are known to be elementwise, or not
    probe_run     steps a copy of an optimizer on small tensors
    probe         classifies an optimizer: elementwise, full tensors, or refused
    state_sizes   bytes of the states that an optimizer keeps for each parameter
    clone         copies of an optimizer over other tensors
    step          the optimizer step, and the loop over calls of the optimizer
    chunks        chunks of a bucket in a step: loaded, stepped, stored
    state_view    `optimizer.state` as users see it
    state         saves and loads full states; states of tensor owners

Begin with `probe`, then `step`.
"""

from lightning_zero.optim.adamw8bit import AdamW8bit
from lightning_zero.optim.lion8bit import Lion8bit
from lightning_zero.optim.sgd8bit import SGD8bit

__all__ = ["AdamW8bit", "Lion8bit", "SGD8bit"]
