"""Which bytes lie where, as integers and dataclasses. Imports no other room: no device, no group.

    stage       which of PARAM, GRAD and OPTIM rest as shards: all that a ZeRO stage is
    config      `ZeroConfig`: what a user may choose
    offload     `OffloadConfig`, and which bucket rests on which tier
    flat        the flat space of one bucket: slots, padding, who owns which elements
    mesh        ranks that share shards, and their replicas
    keep_float32  which layers keep float32 parameters in 16-bit training
    names       names of parameters and modules, in state dicts and in settings
    foreign_names  names that come from a checkpoint: of files, and to be printed
    sizes       numbers with units, as people write and read them
    units       which modules are gathered together
    recompute   which modules run again in backward
    order       what is gathered and reduced next, on all ranks; who waits for whom
    passes      one pass, and the plan that is learned from the logs of passes
    rounds      what ranks say for that in one round, and what is wrong with it
    plan        a module cut into units and buckets
    memory      `MemoryReport`: bytes by tier and state

Begin with `stage`, then `flat`, then `plan`. An engine allocates by these rules and the planner
counts by them.
"""
