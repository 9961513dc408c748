"""Steps the user's optimizers on shards. Imports core and all below it.

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
