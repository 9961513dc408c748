"""The engine: one object that is usable without Lightning. Imports optim and all below it.

    engine        `Engine`: a module, its optimizers and a config
    beginning     how it begins: checks, comparison between ranks, groups, plan, storage, buckets
    optimizers    the optimizers of an engine
    shadow        averages of the weights (EMA, SWA), sharded like the main parameters
    held          sharded tensors that users hold when the engine closes
    offloaded     what is moved to CPU memory while generation needs the device
    counting      bytes held, for `memory_report`
    expected      bytes that will be held at a step, for messages before the first one
    consistency   descriptions that must be the same on every rank

Begin with `engine`.
"""
