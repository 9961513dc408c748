"""Time: what happens to a bucket from forward to step.

Imports record, layout, tensors, comm and tiers.

    schedule      `Schedule`: the step as hooks call it; buffers such as batch norm's
    unit          units: which are whole, and what is gathered ahead
    reducer       what of a backward is averaged, and when it is shown
    hooks         where modules and autograd call the schedule
    bucket        `Bucket`: parameters that travel together, what they point at; `Masters`
    shards        what of a bucket rests on this rank
    gradients     the same for its gradients, from autograd's views to reduced shards
    norm          norms over shards, and clipping
    access        `gathered` and `full_grad`: a look from outside
    writes        how a write to a parameter is seen
    lockstep      `uneven_calls`: forwards whose number differs by rank
    building      sharding while `configure_model` builds
    materialize   memory for modules built on the meta device
    mixed_dtypes  layers that keep float32 parameters
    step_worker   the thread that steps beside the next forward

Begin with the note at the top of layout/order.py, then `schedule` and `bucket`. A gradient arrives
at a hook of `hooks`; `Gradients.accumulate` takes it, and knows when its bucket has all. Then
`reducer` tells the order of all ranks (`CollectiveOrder.mark_ready`), which calls `Schedule.issue_reduction` when
its turn has come: by way of `Reducer.reduce` it comes to `Gradients.reduce`. From then on the mean
is `Gradients.main_grad`, or rests in an `OffloadedGrad`. What a gather waits for: the note at the top
of `schedule`. What a rank that raises does to itself: `Schedule.reset_all`; what becomes of the
others: the end of comm's text.
"""
