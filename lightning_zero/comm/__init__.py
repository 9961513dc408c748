"""Ranks that talk: the only caller of collectives. Imports record, layout and tensors.

    world       what must hold before an engine: WORLD, its backend, its timeouts
    communicator  `Communicator`: all-gather, reduce-scatter and sums of one engine, over groups of
                its own, along the axes of a mesh
    backends    how flat tensors travel: over gloo from peer to peer, over NCCL natively
    control     small integers, masks and objects between CPUs; what ranks agree on, in rounds of
                log2(N) messages; and `Channel`, for a thread beside the training
    collectives  the user's own, seen before they are issued
    alike       facts that must be the same on every rank, compared
    watchdog    a thread per rank that hears of another's end, and ends every wait for it
    peers       the processes of this node, watched by the kernel; the store of the watchdogs
    reports     what every rank is doing, for whoever waits too long

Begin with `communicator`. Why a wait ends when a rank does not come: `watchdog`. What becomes of
the other ranks when one raises: with an engine alone, its round says so (`CollectiveOrder.flush_schedule`);
under the Trainer ranks go on together if they can, by `Communicator.regroup`, which `_can_communicate` in
strategy/engine_strategy.py asks for; before there is an engine, `Watchdog.abort`; as one begins,
`alike.compare`; in whole files and opening, `world.failing_together`; in sharded saves,
`Channel.attempt`.
"""
