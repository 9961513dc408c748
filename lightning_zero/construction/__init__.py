"""Memory and values for modules on the meta device. Imports core and below.

Its module `materialize` gives them, unit by unit, while an engine wraps the parameters.
"""
