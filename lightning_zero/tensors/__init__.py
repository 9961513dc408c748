"""Tensors, parameters and their views. Imports layout and record.

    buffer      `FlatBuffer`: memory of one bucket, with one view for each parameter
    freed       reads of freed memory: NaN or an error
    guarded     sharded parameters, which are unsharded when they are used
    lazy        `LazyTensor`: values that are read from a file when they are used
    shard_spec  elements of a parameter that each rank has
    sharded     `ShardedTensor`: `p.grad` and `p.data` of a sharded parameter
    operators   which operators of torch are elementwise
    live        sharded tensors that are alive, and their end with their engine
    reductions  sums, extremes and norms over the shards of all ranks
    composite   tensors made of tensors, such as quantized states
    ties        parameters that share memory, which become one parameter
    meta        parameters without memory: on the meta device, or dropped after training

Begin with `buffer`, then `guarded`.
"""
