"""Launch of a job: the start of its ranks, and the settings of a Hydra application.

Imports health and layout. Only this package and later ones import lightning; only this package, and
`cli.plan` to read configurations, import Hydra.

    launchers   start the ranks of a node, unless torchrun or srun have started them
    children    the ranks that this process has started, until the end of their job
    slurm       check of a job's layout, and the command that requeues a job
    hydra       the Hydra job of this process, and the command of one of its ranks
    hydra_jobs  a Hydra callback that separates the jobs of a sweep
    options     names, types and defaults of the strategy's options
    schema      schema and resolvers for the files of `conf`
    extras      warnings, tags and printed settings of a composed configuration
    trainer     the Trainer of a composed configuration, which logs its settings

Begin with `launchers`. What a run does with the Trainer's method (resume, requeue) is an argument
of the launchers. `lightning_zero.conf` gives `trainer` the classes of strategy and observe.
"""
