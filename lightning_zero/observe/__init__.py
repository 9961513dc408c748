"""Observation of a run: callbacks, loggers, files and plots.

Imports `record`, `layout`, `checkpoint` and `strategy`. The only package that imports W&B.

    monitor     `ZeroMonitor`, the callback, and the monitor of one fit
    windows     which steps of a fit are recorded, and where a recording begins and ends
    metrics     metrics of a recorded step, and throughput between two of them
    report      `MemoryTable`, and the report at the end of a job
    fingerprints  `Fingerprints`: writes a run down, to be compared with another one
    progress    `ProgressLines`, progress as lines of text
    tables      text in columns, fitted to the width of the terminal
    recordings  files of recordings, and traces in the Trace Event Format for Perfetto
    plots       plots of a step and of memory
    loggers     loggers that continue after a requeue, and panels for W&B

Start reading at `monitor`.
"""
