"""Transport between ranks: the caller of collectives.

Imports record, layout, tensors and health.

    communicator  `Communicator`: collectives of one engine, on its own process groups along the
                  axes of a mesh
    backends      data plane: peer to peer over gloo, or NCCL's own collectives
    control       control plane: integers, masks and objects between CPUs, in rounds of log2(N)
                  messages; and `Channel`, for a background thread
    rounds        votes and results of rounds, and their checks
    collectives   detects the user's collectives before they are issued
    consistency   checks that model, optimizers and settings are equal on all ranks

Begin with `communicator`. If a rank raises an exception, the other ranks are notified:

    while an engine is made            from `consistency.compare`
    before there is an engine          from `Watchdog.abort`
    with an engine alone               from the next round, by `CollectiveOrder.flush_schedule`
    under the Trainer                  from `Communicator.regroup`, after which they continue if
                                       they can (`_can_communicate` in strategy/engine_strategy.py)
    in full checkpoints and loading    from `world.failing_together`
    in sharded checkpoints             from `Channel.attempt`
"""
