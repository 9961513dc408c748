"""What a run shows: callbacks, loggers, files and pictures.

Imports record, layout, checkpoint and strategy; the only room that knows W&B.

    monitor     `ZeroMonitor`, the callback, and one fit as it sees it
    metrics     what is logged of a step, and of the time between two: speed
    report      `MemoryTable`, and what a job says when it ends
    tables      text in columns, as wide as the terminal
    recordings  their files, and the Trace Event Format, for Perfetto
    plots       pictures of a step and of memory
    loggers     loggers that continue after a requeue; what W&B shows beside curves
    composed    the Trainer of a Hydra configuration, for `lightning_zero.conf`

Begin with `monitor`.
"""
