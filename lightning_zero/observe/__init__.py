"""What a run shows: callbacks, loggers, files and pictures.

Imports record, layout and strategy; the only room that knows W&B.

    monitor       `ZeroMonitor`: the callback
    watch         one fit as it sees it: recorded steps, means over them, files
    metrics       what is logged of a step
    throughput    and of the time between two of them: samples, tokens and FLOPs per second
    report        `MemoryTable`, and what a job says when it ends
    tables        text in columns, as wide as the terminal
    files         where recordings lie, and how they are read again
    chrome        the Trace Event Format, for Perfetto
    plots         pictures of a step and of memory; matplotlib is imported when one is drawn
    loggers, wandb_panels  loggers that continue after a requeue
    run_settings  what they are told of a run: its settings, the strategy's, the model's size
    composed      the Trainer of a Hydra configuration, for `lightning_zero.conf`

Begin with `monitor`.
"""
