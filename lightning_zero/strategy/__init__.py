"""The Lightning side: the strategies, and the start and end of ranks.

Imports the engine, checkpoint, planner, deepspeed and launch.

    strategy          `ZeroStrategy`, which a user gives the Trainer: its options
    settings          arguments: their checks, the choice of stage "auto". Wrong settings are errors
                      before any process group; a model that does not fit into memory is an error
                      in set-up
    announce          the line at set-up: stage, ranks, and memory of the model states
    engine_strategy   the engine of a run: set-up, closures, gradients, failure, teardown, and the
                      module after a fit
    checkpointing     Lightning's calls that save and load checkpoints
    saving            saves, full and sharded
    loading           loading of modules from checkpoints of every format, without a Trainer
    finite            checkpoints with and without non-finite parameters
    processes         identity and connection of ranks, and collectives on WORLD
    batch_group       ranks that get the same samples
    requeue           requeueing of a SLURM job between two batches
    resume            the checkpoint from which a run resumes
    rank_state        random generators and data loaders of each rank, in checkpoints
    loops             the check of all ranks between two batches, and evaluation with a different
                      number of batches on each rank
    precision         clipping, the loss scale, dtypes
    float8            linear layers in float8
    averages          Lightning's averages of weights, with `engine.shadow`
    patches           temporary patches of methods of Lightning's objects

Begin with `strategy`, then `engine_strategy` and `checkpointing`.
"""
