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
`assign_tiers` chooses the tiers of each bucket's parameters, optimizer states and gradients;
`_tier` in engine/shadow.py those of an average. A new tier needs a `Tier` there, with its cases in
`Tier.is_offloaded`, `OffloadConfig` and `assign_tiers`.

If it is memory, `Storage._keep` and `OffloadedGrad.store` allocate it, and `MemoryShardStore`
stores it; `Shards.before_write` must wait for an all-gather's copy from it (`Shards._is_uploaded`).
Optimizer states in memory belong to the optimizer: `BucketStep._move_states` and
`OptimStates.slice` move them.

If it is not memory, it needs one more class in the union `ShardStore`, with `tier`, `numel`,
`dtype`, `nbytes`, `fetch`, `write` and `view`; a way into and out of buffers in optim/chunks.py; a
way into the all-gather (`Shards.all_gather_source`); and a case wherever `Tier.NVME` or
`FileShardStore` is named, above all in `OffloadedGrad._stored`, which writes the gradient.
`Storage.make_optim_store` makes the stores of optimizer states.

Bytes and times are in `nvme_bytes` of layout/plan.py, layout/memory.py, engine/counting.py,
record/spans.py, observe/metrics.py and planner; its planned_engine.py replaces the files.
Names for users are in _registration.py, conf/offload and deepspeed/translate.py. Nothing changes in
comm, in the collective order, in hooks and in checkpoints.
"""
