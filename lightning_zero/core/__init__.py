"""The run time of units and buckets, from forward to optimizer step.

Imports record, layout, tensors, health, comm and tiers.

    coordinator    `StepCoordinator`: the moments of a step, called by the hooks
    shared_buffers buffers that every rank copies from rank 0
    order          `CollectiveOrder`: which collective comes next, on all ranks
    passes         one pass, and the schedules recorded from passes
    unit           `Unit`: buckets that are unsharded together; `Unsharder`
    reducer        `Reducer`: which buckets a backward reduces, and the means at its end
    hooks          hooks of modules and autograd, which call the coordinator
    first_use      waits of modules for the all-gathers after a step
    bucket         `Bucket`: parameters that are communicated together, and what happens when
    wrapping       parameters as a bucket wraps and unwraps them
    shards         stores of a bucket's shards on this rank
    masters        a bucket's elements in full precision: loaded, stored, gathered
    full_tensors   tensors of a bucket on their owners, in a step of an optimizer that needs them
    gradients      gradients of a bucket, from autograd's tensors to the main gradient
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

Begin with the note at the top of core/order.py, then read `coordinator` and `bucket`.

For sharded parameters, the collective order decides which all-gather comes next, and
`Unsharder.prefetch` how early. A hook reports the use of a unit to `StepCoordinator.pre_forward` or
`pre_backward`, these to the `Unsharder`, which requests the unit
(`CollectiveOrder.request_unshard`) and prefetches the next ones of a recorded schedule, as far as
`overlap_comm`, `prefetch_bucket_size` and `reshard_after_forward` allow, and
up to the next reduction in the schedule. The order calls `Unsharder.issue_unshard` in its turn, and
so `Bucket.unshard` and `Communicator.all_gather`. The turn is that of the recorded schedule, which
`hoist_all_gathers` makes from the log of an earlier pass, and which all ranks have adopted in the
same round. Where there is no schedule, or a unit is not in its rest, the turn is decided in a
control-plane round: the lowest request of all ranks comes first, every rank issues its all-gather,
and the others repeat their requests. The root, and other units that stay unsharded, are requested
when a forward or backward begins (`Unsharder.unshard_for_step`); a parameter that is used outside
its unit's forward by `StepCoordinator.unshard_out_of_order`.

Replicated parameters whose optimizer states are sharded (stages 1 and 2) are all-gathered after
their step: the optimizer step calls `Bucket.end_step`, with `overlap_step` in the thread of
`step_worker`.

A gradient arrives at a hook of `hooks`. `Gradients.accumulate` takes it and returns whether its
bucket is complete. Then `reducer` marks the bucket as ready in the collective order
(`CollectiveOrder.mark_ready`). In its turn this calls `Reducer.issue_reduction`, and so
`Gradients.reduce`. The mean is `Gradients.main_grad`, or is stored in an `OffloadedGrad`. See
`coordinator` for what an all-gather waits for, and the end of comm's text for what an exception
does.
"""
