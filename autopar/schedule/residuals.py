"""What does the forward pass of a stage keep for its backward pass alone, and what of it lies in the memory of the host?

A *residual* of a stage is a value of a microbatch that its FORWARD executable leaves and only its BACKWARD and WEIGHT
executables read: no other stage is sent it, and nothing that runs once in a step reads it.  Under k microbatches in flight it is
there k times.

A hosted residual lies in the memory of the host between the passes.  The executables themselves copy it:

    FORWARD    …  v = f(…)  ⟶  host            BACKWARD    host ⟶ v, …            (WEIGHT, where it reads v, likewise)

so on the device it is there for one microbatch, while one of these executables runs.  It lies there by value, in whichever
layouts it is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace

from autopar.errors import PlanError
from autopar.schedule.instructions import Part
from autopar.schedule.slices import Place, Scope, Slices
from autopar.schedule.spmd import Hosted, local_bytes

READERS = frozenset((Part.BACKWARD, Part.WEIGHT))

SMALL_SHARE = 1e-3
"""Residuals below this share of a stage's largest are not large: they are many, and weigh nothing."""


@dataclass(frozen=True)
class Residual:
    """A value that is kept for the backward pass alone; bytes of one microbatch on one device.

    ``copies`` are those of a microbatch if it lies in the memory of the host, of all of them ``copied_bytes``.
    """

    value: int
    size_bytes: int
    copies: int
    copied_bytes: int


def residuals_of(slices: Slices) -> tuple[Residual, ...]:
    """The residuals of a stage, by value."""
    places: defaultdict[int, list[Place]] = defaultdict(list)
    for place in _places_of_residuals(slices):
        places[place.buffer.value].append(place)
    body = {one.part: one.program for one in slices.executables}.get(Part.FORWARD)
    readers = [argument.place for one in slices.executables for argument in one.arguments if one.part in READERS]
    found = []
    for value, own in sorted(places.items()):
        assert body is not None
        sizes = [local_bytes(body, place.buffer) for place in own]
        times = [1 + readers.count(place) for place in own]
        copied_bytes = sum(size * often for size, often in zip(sizes, times, strict=True))
        found.append(Residual(value, sum(sizes), sum(times), copied_bytes))
    return tuple(found)


def large_residuals(slices: Slices) -> tuple[Residual, ...]:
    """Those of the residuals that weigh anything."""
    found = residuals_of(slices)
    least_bytes = SMALL_SHARE * max((one.size_bytes for one in found), default=0)
    return tuple(one for one in found if one.size_bytes >= least_bytes)


def with_hosted(slices: Slices, values: Collection[int]) -> Slices:
    """The executables with these residuals in the memory of the host.

    Raises :class:`~autopar.errors.PlanError` where one of the values is no residual.
    """
    if not values:
        return slices
    places = {place for place in _places_of_residuals(slices) if place.buffer.value in values}
    if odd := sorted(set(values) - {place.buffer.value for place in places}):
        raise PlanError(
            f"the plan has value {odd[0]} of a stage in the memory of the host, which that stage does not keep for its backward "
            "pass alone; plan again for this step"
        )
    executables = []
    for one in slices.executables:
        inputs = frozenset(k for k, argument in enumerate(one.arguments) if argument.place in places)
        outputs = frozenset(k for k, result in enumerate(one.results) if result.place in places)
        executables.append(replace(one, hosted=Hosted(inputs, outputs)))
    return replace(slices, executables=tuple(executables))


def hosted_places(slices: Slices) -> frozenset[Place]:
    """What lies in the memory of the host."""
    return frozenset(one.results[k].place for one in slices.executables for k in one.hosted.outputs)


def _places_of_residuals(slices: Slices) -> tuple[Place, ...]:
    """Where residuals lie between the passes."""
    made: dict[Place, None] = {}
    elsewhere = set(slices.outputs)
    for one in slices.executables:
        if one.part is Part.FORWARD:
            made.update((result.place, None) for result in one.results if result.buffer is not None)
            elsewhere.update(argument.place for argument in one.arguments)
        elif one.part in READERS:
            elsewhere.update(result.place for result in one.results)
        else:
            elsewhere.update(argument.place for argument in one.arguments)
            elsewhere.update(result.place for result in one.results)
    read = {argument.place for one in slices.executables if one.part in READERS for argument in one.arguments}
    values = slices.program.values
    return tuple(
        place
        for place in made
        if place.scope is Scope.MICROBATCH
        and place in read
        and place not in elsewhere
        and not values[place.buffer.value].dtype.startswith("key<")
    )
