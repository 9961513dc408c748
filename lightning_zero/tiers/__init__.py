"""Where shards rest, and how they travel: the device, CPU memory, files on an NVMe disk.

Imports record, layout and tensors.

    storage       `Storage`: all stores of an engine, and the copies between tiers
    grad_offload  gradient shards that rest off the device
    pipeline      reads, works and writes ranges of files, each behind the other
    nvme          the files of one process: reads and writes in order, past the page cache
    disk          what the file system gives: room, O_DIRECT, a directory that goes with us
    memory        page-aligned, pinned buffers, and how much CPU memory there is

Begin with `storage`. A new tier for optimizer state is a `Tier` in layout/offload.py, which tells
who gets it; one more class in the union `ShardStore`, made by `Storage`; where it is no memory, a
way into and out of buffers in optim/chunks.py, and a word in engine/optimizers.py and in
`Shards.stores`, which name NVMe; and its bytes in engine/counting.py and planner/memory.py.
"""
