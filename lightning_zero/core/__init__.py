"""The run time of units and buckets, from forward to optimizer step.

Imports record, layout, tensors, health, comm and tiers.

    step           `Step`: the verbs of a step in the order of time, called by the hooks
    coordinator    `StepCoordinator`: begin and end of forwards, backwards and runs
    shared_buffers buffers that every rank copies from rank 0
    order          `CollectiveOrder`: which collective comes next, on all ranks
    passes         one pass, and the schedules recorded from passes
    unit           `Unit`: buckets that are unsharded together; `Prefetcher`
    reducer        `Reducer`: which buckets a backward reduces, and the means at its end
    hooks          hooks of modules and autograd, which call `Step`
    first_use      waits of modules for the all-gathers after a step, in stages 1 and 2
    bucket         `Bucket`: parameters that are communicated together, and their step
    params         `Params`: what the parameters of a bucket point at; unshard and reshard
    wrapping       parameters as a bucket wraps and unwraps them
    shards         stores of a bucket's shards on this rank
    optim_states   optimizer states of a bucket: the elements of this rank, and files
    masters        a bucket's elements in full precision: loaded, stored, gathered
    full_tensors   tensors of a bucket on their owners, in a step of an optimizer that needs them
    gradients      gradients of a bucket, from autograd's tensors to the main gradient
    local_grads    the unsharded gradients of a bucket, where gradients are not sharded
    main_grad      the main gradient: the mean over ranks, on its tier
    param_grads    `.grad` of a bucket's parameters
    compiling      hides gradients while torch.compile traces a graph
    bucket_access  what a parameter calls when code outside of the engine uses it
    guard          finds non-finite gradients before they are reduced, and reports them
    norm           norms of sharded gradients, and clipping
    access         `gathered`, `full_grad`, `uneven_calls`: calls of the user on all ranks
    writes         what users do to parameters: write to them, assign `.data`, keep views
    lockstep       a number of forwards that differs between ranks
    recompute      activation checkpointing
    mixed_dtypes   explanation of errors that follow from the cast to `param_dtype`
    step_worker    the thread that steps while the next forward runs

Begin with the notes at the top of core/step.py and core/order.py, then read `bucket` and `params`.

"Collective" is a call after which every rank has issued the same events, not always at one time.
A *replica* is a group of ranks that holds all shards, where `sharding_group_size` makes several;
*replicated* parameters or states are not sharded at all:

    stage   sharded                                       gradients are reduced
    0       nothing                                       at the end of a step, to all ranks
    1       optimizer states, main gradients              at the end of a step
    2       the same, and gradients                       in every backward
    3       the same, and parameters but for small ones   in every backward

When an all-gather of sharded parameters is issued:

* A unit in the rest of the recorded schedule (the events still to come): in its turn. A rank that
  needs it issues what comes before it. `hoist_all_gathers` makes the schedule from a log.
* Another unit, or without a schedule: by a control-plane round. The lowest request of all ranks
  comes first, every rank issues its all-gather, and the others repeat their requests.
* Before its use: `Prefetcher.prefetch` issues all-gathers that are next in the schedule, as far as
  `overlap_comm`, `prefetch_bucket_size` and `reshard_after_forward` allow.
* Outside of the order: `gathered`, checkpoints (`Masters`), and replicated parameters after a step.

The root, and other units that stay unsharded, are used when a forward or backward begins; a
parameter outside its unit's forward by `StepCoordinator.unshard_out_of_order`.

Replicated parameters whose optimizer states are sharded (stages 1 and 2) are all-gathered after
their step: the optimizer step calls `Bucket.end_step`, with `overlap_step` in the thread of
`step_worker`.

A gradient arrives at `Step.post_accumulate_grad`. `Gradients.accumulate` takes it and returns
whether its bucket is complete. In its turn in the order the bucket is reduced: `Gradients.reduce`.
The mean is `MainGrad.tensor`, perhaps a view of an `OffloadedGrad`. See the end of comm's text for
what an exception does.
"""
