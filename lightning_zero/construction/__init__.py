"""Parameters that get memory and values before an engine wraps them. Imports core and below.

    building     sharding while `configure_model` builds
    materialize  memory and values for modules built on the meta device

Begin with `building`. `Engine` calls `materialize`; the strategy opens a `Building` around
`configure_model`.
"""
