"""Ranks that talk: the only caller of collectives. Imports record, layout and tensors.

    world       what must hold before an engine: WORLD, its backend, its timeouts
    communicator  `Communicator`: all-gather, reduce-scatter and sums of one engine, over groups of
                its own
    groups      process groups: along which axes they are made, and how they are cut
    backends    how flat tensors travel: over gloo from peer to peer, over NCCL natively
    rounds      what every rank says at once, and all hear, in log2(N) messages
    control     small integers, masks and objects between CPUs; what ranks agree on
    channel     the same on a group of its own, for a thread beside the training
    alike       facts that must be the same on every rank, compared
    watchdog    a thread per rank that hears of another's end, and ends every wait for it
    peers       the processes of this node, watched by the kernel
    doing       what this rank is doing, and what it waits for
    reports     the same of all ranks, for whoever waits too long
    rank_store  the store through which the watchdogs talk

Begin with `communicator`. Why a wait ends when a rank does not come: `watchdog`. What a rank does
about an exception is decided above: in a step by core/schedule.py, in a run of the Trainer by
strategy/engine_strategy.py (`on_exception`), in set-up and files by `world.failing_together`.
"""
