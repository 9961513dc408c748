"""The Lightning side: the strategies, and how ranks start and end.

Imports the engine, checkpoint, planner and deepspeed; from here on lightning and Hydra are known.

    strategy          `ZeroStrategy`: what a user gives the Trainer; states saved and loaded
    settings, schema  its arguments, checked, or chosen by the planner; the same for Hydra. What is
                      wrong is refused before any process group, here and by constructors; what
                      does not fit into memory, in set-up
    engine_strategy   engines over a run: set-up, closures, gradients, failure, teardown, and what
                      is left after a fit
    saving            checkpoints on their way to the disk and back, whole and sharded
    processes, children, hydra, hydra_jobs  who the ranks are, and how they start
    slurm             a job's layout, and its requeueing
    resume            the checkpoint from which a run resumes
    loops             what all ranks agree on between two batches, and evaluation with another
                      number of batches on each rank
    precision         clipping, the loss scale, dtypes
    averages          Lightning's averages of weights, over `engine.shadow`
    patches           methods of Lightning's objects, replaced for a time

Begin with `strategy`, then `engine_strategy`.
"""
