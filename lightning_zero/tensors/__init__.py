"""One tensor and its views. Imports layout.

    buffer      `FlatBuffer`: memory of one bucket, and a view of it for each parameter
    freed       what views of freed memory show
    guarded     parameters that are not whole: a use of one makes its bucket whole
    lazy        `LazyTensor`: values that are read from a file when they are used
    shard_spec  which elements of a parameter each rank has
    sharded     what `p.grad` and `p.data` are where a parameter rests as a shard
    full_view   gathered values of such a one, to be looked at and written to
    composite   tensors made of tensors, such as quantised states
    ties        parameters that show the same memory, which become one
    meta        parameters without memory: given some, awaited, or dropped

Begin with `buffer`, then `guarded`.
"""
