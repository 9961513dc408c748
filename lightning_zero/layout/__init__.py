"""Layout of model states as integers and dataclasses. Imports no other package; needs no device.

    stage       the model states that a ZeRO stage shards
    config      `ZeroConfig`, the options of the engine
    offload     `OffloadConfig`, and the tier of each bucket
    flat        the flat layout of one bucket: slots, padding, the elements of each rank
    mesh        shard groups and replica groups
    keep_float32  parameters that keep float32 in 16-bit training
    names       names of parameters and modules, in state dicts and in settings
    foreign_names  checks of names that come from a checkpoint
    foreign_options  errors for unknown options, such as those of other strategies
    sizes       numbers with units
    units       modules whose parameters are unsharded together
    plan        a module divided into units and buckets
    memory      `MemoryReport`: bytes by tier and state

Begin with `stage`, then `flat`, then `plan`. The engine allocates and the planner counts by these
rules.
"""
