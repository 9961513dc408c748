"""Transport between ranks: the caller of collectives.

Imports record, layout, tensors and health.

    communicator  `Communicator`: collectives of one engine, on its own process groups along the
                  axes of a mesh
    backends      data plane: peer to peer over gloo, or NCCL's own collectives
    control       control plane: integers, masks and objects between CPUs, in rounds of log2(N)
                  messages; and `Channel`, for a background thread
    rounds        votes and results of rounds, and their checks
    world         collectives on WORLD, for a strategy
    collectives   detects the user's collectives before they are issued
    fake          a process as one rank of a group that does not exist, for the planner
    consistency   checks that model, optimizers and settings are equal on all ranks

Begin with `communicator`. If a rank raises an exception, the other ranks raise one, too:

    in work after which all ranks meet  its error, with a cause that names the rank, by
                                        `health.together.run_on_all_ranks`
    in a Trainer's fit                  a `PeerAbortedError`: `_can_communicate` in
                                        strategy/engine_strategy.py calls `Communicator.regroup`,
                                        and its `Watchdog.abort` ends the waits of all ranks
    in another loop                     a `PeerFailedError` in uneven calls (`Lockstep`), else a
                                        `PeerAbortedError` when the script of the rank ends

Where all ranks regroup in time, a checkpoint can be saved, the module gets its full tensors, and
fit or validate may follow. Where they do not, shards are lost: nothing is saved, and using a
sharded parameter is an error (`StepCoordinator.mark_lost`). Without a Trainer, ranks do not
regroup. Ranks that are in the middle of a pass issue the rest of its schedule before they learn of
a failure: `CollectiveOrder.flush_schedule` and `report_failure`.
"""
