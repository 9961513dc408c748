"""The Lightning side: the strategies, and the start and end of ranks.

Imports the engine, checkpoint, planner and deepspeed. Only this package and later ones import
lightning and Hydra.

    strategy          `ZeroStrategy`, which a user gives the Trainer; saving and loading of states
    settings, schema  arguments: their checks, the choice of stage "auto", the schema for Hydra.
                      Wrong settings are errors before any process group; a model that does not fit
                      into memory is an error in set-up
    engine_strategy   the engine of a run: set-up, closures, gradients, failure, teardown, and the
                      module after a fit
    saving            saving and loading of checkpoints, full and sharded
    processes, children, hydra, hydra_jobs  identity and start of ranks
    slurm             check of a job's layout, and requeueing
    resume            the checkpoint from which a run resumes
    loops             the check of all ranks between two batches, and evaluation with a different
                      number of batches on each rank
    precision         clipping, the loss scale, dtypes
    averages          Lightning's averages of weights, with `engine.shadow`
    patches           temporary patches of methods of Lightning's objects

Begin with `strategy`, then `engine_strategy`.
"""
