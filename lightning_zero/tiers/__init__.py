"""Tiers in which shards are stored (device, CPU, NVMe), and the transfers between them.

Imports record, layout and tensors.

    storage       `Storage`: all stores of an engine, and the copies between tiers
    state_offload states whose device memory is free between two steps
    grad_offload  gradient shards that are stored off the device
    pipeline      reads, processes and writes ranges of files, overlapping all three
    nvme          the files of one process: ordered reads and writes past the page cache
    disk          the file system: free space, O_DIRECT, a directory that is removed at exit
    memory        page-aligned, pinned buffers, and the available CPU memory
    threads       threads of a CPU that steps offloaded shards

Begin with `storage`. In layout/offload.py `OffloadConfig` has the user's word for a tier, and
`assign_tiers` chooses the tier of each bucket. A new tier for optimizer states needs: a `Tier`
there; one more class in the union `ShardStore`, made by `Storage`, with `tier`, `numel`, `dtype`,
`nbytes`, `fetch`, `write` and `view`; if the tier is not memory, a way into and out of buffers in
optim/chunks.py, and a case in engine/optimizers.py and in `Shards.stores`, which name NVMe; and its
bytes in engine/counting.py and planner/memory.py. For parameters it needs a way into the
all-gather, too (`Shards.all_gather_source`), and for gradients `OffloadedGrad`.
"""
