"""A step as the order of registration suggests it, for a module whose inputs are not known."""

from __future__ import annotations

from lightning_zero.layout.plan import Plan, UnitPlan
from lightning_zero.planner.trace import Event, Moment, StepTrace

__all__ = ["plain_trace"]


def plain_trace(plan: Plan) -> StepTrace:
    """A step in the order of registration, without activations, for a module that cannot be run."""
    units = [unit for unit in plan.units if unit.name]
    moments = []
    for unit in units:
        moments.append(Moment(Event.FORWARD, unit.name, is_awaited=True))
        moments.append(Moment(Event.FORWARD_END, unit.name))
    moments.append(Moment(Event.TURN))
    for unit in reversed(units):
        moments.append(Moment(Event.BACKWARD, unit.name))
        moments += _gradients_of(unit)
        moments.append(Moment(Event.BACKWARD_END, unit.name))
    for unit in plan.units:
        if not unit.name:
            moments += _gradients_of(unit)
    return StepTrace((*moments, Moment(Event.END)))


def _gradients_of(unit: UnitPlan) -> list[Moment]:
    return [
        Moment(Event.GRAD, slot.name)
        for bucket in reversed(unit.buckets)
        if bucket.is_trainable
        for slot in reversed(bucket.layout.slots)
    ]
