"""The Lightning side: the strategies, and how ranks start and end.

Imports the engine, checkpoint, planner and deepspeed; from here on lightning and Hydra are known.

    strategy          `ZeroStrategy`: what a user gives the Trainer
    settings, schema  its arguments, checked; the same for Hydra
    engine_strategy   engines over a run: set-up, closures, gradients, teardown
    lifecycle         what a strategy holds of its engines, whether ranks go on together after an
                      exception, and what is left after a fit
    checkpointing, checkpoint_io, saving  Lightning's checkpoints, whole and sharded
    processes, launch, children, hydra, hydra_jobs  who the ranks are, and how they start
    signals           SIGTERM and requeue, acted on by all ranks together between two batches
    precision         clipping, the loss scale, dtypes
    evaluation        validation with another number of batches on each rank
    averages          Lightning's averages of weights, over `engine.shadow`
    patches           methods of Lightning's objects, replaced for a time
    auto              `stage="auto"`: the planner's choice
    checks            what cannot be trained, refused by name

Begin with `strategy`, then `engine_strategy`.
"""
