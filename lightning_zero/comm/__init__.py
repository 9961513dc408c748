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
    anywhere else                       a `PeerFailedError` where they wait for it: its
                                        `Watchdog.abort` ends their waits within seconds

An exception that leaves a forward, a backward or a step ends the *run* of the engine
(`StepCoordinator.end_run`), on this rank alone and without a collective. Under a Trainer every
exception does. The shards stay. The next use of the engine begins another run (`ensure_run`), with
new process groups, no gradients and no recorded order, if every rank has raised an exception of its
own and comes within a minute. Then a checkpoint can be saved, the module gets its full tensors as
far as `unshard_after_fit` allows it, and fit or validate may follow. If not, shards are lost:
nothing is saved, and every use of a parameter that is not unsharded is a `PeerFailedError`.
"""
