"""How the user's optimizers are stepped on shards. Imports core and all below it.

    flow          follows which elements each element of a step depends on
    probe_run     steps a copy of an optimizer on small tensors
    probe         decides by both: elementwise, whole tensors, or refused
    clone         an optimizer's copy over other tensors
    step          one step: all at once, or bucket by bucket with its states on another tier
    chunks        one bucket, in chunks that are read, stepped and written behind each other
    methods       other methods of an optimizer's class, which run where its step runs
    state_view    what users see as `optimizer.state`
    state         the state dict of whole tensors, in and out; states that one rank owns whole

Begin with `probe`, then `step`.
"""
