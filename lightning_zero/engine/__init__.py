"""All of it in one object, usable without Lightning. Imports optim and all below it.

    engine        `Engine`: a module, its optimizers, a config; and how it begins
    optimizers    the optimizers of an engine
    shadow        averages of the weights (EMA, SWA), in shards beside the masters
    counting      bytes held, for `memory_report`
    consistency   what must be the same on every rank

Begin with `engine`.
"""
