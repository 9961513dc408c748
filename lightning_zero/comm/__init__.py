"""Ranks that talk: the only caller of collectives. Imports record, layout and tensors.

    world       what must hold before an engine: WORLD, its backend, its timeouts
    communicator  `Communicator`: all-gather, reduce-scatter and sums of one engine, over groups of
                its own, along the axes of a mesh
    backends    how flat tensors travel: over gloo from peer to peer, over NCCL natively
    control     small integers, masks and objects between CPUs; what ranks agree on, in rounds of
                log2(N) messages; and `Channel`, for a thread beside the training
    alike       facts that must be the same on every rank, compared
    watchdog    a thread per rank that hears of another's end, and ends every wait for it
    peers       the processes of this node, watched by the kernel; the store of the watchdogs
    reports     what every rank is doing, for whoever waits too long

Begin with `communicator`. Why a wait ends when a rank does not come: `watchdog`. What a rank does
about an exception is decided above: in a step by core/schedule.py, in a run of the Trainer by
strategy/engine_strategy.py (`on_exception`), in set-up and files by `world.failing_together`.
"""
