"""Transport between ranks: the caller of collectives.

Imports record, layout, tensors and health.

    communicator  `Communicator`: collectives of one engine, on its own process groups along the
                  axes of a mesh
    backends      data plane: peer to peer over gloo, or NCCL's own collectives
    control       control plane: integers, masks and objects between CPUs, in rounds of log2(N)
                  messages; and `Channel`, for a background thread
    rounds        votes and results of rounds, and their checks
    world         collectives on WORLD, for a strategy
    fake          a process as one rank of a group that does not exist, for the planner
    consistency   checks that model, optimizers and settings are equal on all ranks

Begin with `communicator`. If a rank raises an exception, the other ranks raise one, too:

    in work after which all ranks meet  a copy of its error, with a cause that names the rank; if
                                        the work has a name, an error whose text names rank and
                                        error. By `health.together.run_on_all_ranks`
    under a Trainer, in a fit or an     a `PeerAbortedError`. `StepCoordinator.reset` comes first;
    evaluation                          then `_can_communicate` in strategy/engine_strategy.py
                                        calls `Engine.regroup`, and so `Communicator.regroup`, which
                                        waits up to a second for errors of all ranks; then its
                                        `Watchdog.abort` ends the waits of the others, which come
                                        to `Engine.regroup` in the same way
    in another loop                     a `PeerFailedError` in uneven calls (`Lockstep`), else a
                                        `PeerAbortedError` when the script of the rank ends

A rank that does not wait for others raises at its next wait. Each rank raises its own error again
after teardown.

Where all ranks regroup in time (a minute, or the timeout if that is shorter), a checkpoint can be
saved, the module gets its full tensors as far as `unshard_after_fit` allows it, and fit or validate
may follow. Where they do not, shards are lost: nothing is saved, and using a parameter that is not
unsharded is an error (`StepCoordinator.mark_lost`).

Without a Trainer, ranks do not regroup: a rank that has raised in a forward, a backward, a step or
`Engine.forward_context` first issues the collectives that others wait for, such as the rest of its
schedule (`StepCoordinator.reset`, `CollectiveOrder.flush_schedule`; `report_failure` in uneven
calls), so that they reach a round. After an exception between these calls it does so in
`Engine.reset`. If it catches the exception and continues alone, that round ends in a
`DesynchronizedError` on all ranks.
"""
