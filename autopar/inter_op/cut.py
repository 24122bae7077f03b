"""From one looped step to one looped program per stage, and the values that cross between them.

Each stage's program is an ordinary one – before, a loop over microbatches, after – that the intra-operator planner lays out on
the stage's own mesh as it would lay out a whole step.  What other stages make enters as inputs, what they read leaves as
outputs; values of a microbatch stand in both as stacks over the microbatches, which the loop takes apart and puts together.
At run time no such stack exists: the loop's passes are executables of their own, and each value crosses when it is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar import _compat
from autopar.inter_op.looped import Looped
from autopar.inter_op.placing import place
from autopar.inter_op.shares import place_shares
from autopar.inter_op.stage_body import Body, stage_bodies
from autopar.inter_op.stage_update import Late, Updates, sources_of
from autopar.schedule.stage_program import Crossing, Cut, End, Passing, StageProgram


def cut(loop: Looped, state_pairs: Sequence[tuple[int, int]], cuts: Sequence[int]) -> Cut:
    """Cut a step before the anchored forward operators with the numbers ``cuts`` (ascending), or into its shares."""
    placing = place_shares(loop) if loop.shares else place(loop, cuts)
    bodies = stage_bodies(loop, placing)
    return _Assembly(loop, bodies, Updates(loop, bodies), dict(state_pairs)).make()


@dataclass
class _Needs:
    """What a stage reads from outside: equations by number and leaves (variables), for its loop and for what follows."""

    equations: dict[int, Any]
    leaves: set[Any]


class _Assembly:
    """Owns the numbers of the crossings, and which stage each leaf lives on."""

    def __init__(self, loop: Looped, bodies: tuple[Body, ...], updates: Updates, state_pairs: dict[int, int]) -> None:
        self._loop, self._bodies, self._updates, self._pairs = loop, bodies, updates, state_pairs
        self._jaxpr = _compat.jaxpr_of(loop.graph.jaxpr)
        self._positions = {variable: position for position, variable in enumerate(self._jaxpr.invars)}
        self._inner = _compat.jaxpr_of(loop.body.jaxpr)
        self._operands = dict(zip(loop.body.inputs, loop.loop.equation.invars, strict=True))
        self._inner_of = dict(zip(loop.body.inputs, self._inner.invars, strict=True))
        self._made = {v: var for o in loop.body.operators for v, var in zip(o.results, o.equation.outvars, strict=True)}
        self._owners: dict[int, int] = {}
        self._crossings: list[Crossing] = []
        self._micro: dict[tuple[int, int], Crossing] = {}
        self._late: dict[tuple[Any, int], Crossing] = {}
        self._start: dict[tuple[int, int], Crossing] = {}

    def make(self) -> Cut:
        self._place_leaves()
        needs = [self._needs(stage) for stage in range(len(self._bodies))]
        segments = _Segments(self._updates)
        self._number_crossings(needs, segments)
        stages = tuple(self._stage(number, needs[number], segments) for number in range(len(self._bodies)))
        return Cut(stages, tuple(self._crossings), self._owners)

    # --- leaves ---

    def _place_leaves(self) -> None:
        """A leaf of the state lives where its next value is made; one that is made anywhere, where it is read first."""
        updates = self._updates
        readers: dict[int, int] = {}
        for stage in reversed(range(len(self._bodies))):
            for variable in self._needs(stage).leaves:
                readers[self._positions[variable]] = stage
        anywhere = {output: readers.get(leaf, 0) for leaf, output in self._pairs.items() if not updates.is_held(output)}
        updates.give_outputs(anywhere)
        made = {output: stage for stage, late in enumerate(updates.stages) for output in late.outputs}
        self._owners = {leaf: made[output] for leaf, output in self._pairs.items()}

    def _needs(self, stage: int) -> _Needs:
        late, body = self._updates.stages[stage], self._bodies[stage]
        held = {v for _, equation in late.equations for v in equation.outvars} | set(late.received)
        held |= set(late.results.values())
        atoms = [atom for _, equation in late.equations for atom in equation.invars]
        atoms += late.outputs.values()
        atoms += [self._operands[value] for value in body.inputs]
        equations, found = sources_of([atom for atom in atoms if not _in(atom, held)], self._updates.floating)
        return _Needs(equations, found - held)

    # --- crossings ---

    def _number_crossings(self, needs: Sequence[_Needs], segments: _Segments) -> None:
        for target, need in enumerate(needs):
            for leaf in sorted(self._positions[variable] for variable in need.leaves):
                owner = self._owners.get(leaf, target)
                if owner != target:
                    end = self._cross(Passing.START, owner, target, self._jaxpr.invars[leaf].aval, leaf=leaf)
                    self._start[leaf, target] = end
        for target, body in enumerate(self._bodies):
            for (value, source), _ in sorted(body.received.items()):
                part = self._bodies[source].sent[value, target]
                self._micro[value, target] = self._cross(
                    Passing.MICRO, source, target, self._made[value].aval, part=part, value=value
                )
        for source, late in enumerate(self._updates.stages):
            for variable, target in late.sent:
                self._late[variable, target] = self._cross(
                    Passing.LATE, source, target, variable.aval, segment=segments.of(variable, source)
                )

    def _cross(self, passing: Passing, source: int, target: int, aval: Any, **rest: Any) -> Crossing:
        size = _compat.item_bytes(aval.dtype)
        for extent in aval.shape:
            size *= extent
        one = Crossing(len(self._crossings), passing, source, target, tuple(aval.shape), str(aval.dtype), size, **rest)
        self._crossings.append(one)
        return one

    # --- programs ---

    def _stage(self, stage: int, needs: _Needs, segments: _Segments) -> StageProgram:
        late = self._updates.stages[stage]
        inputs: list[tuple[Any, End]] = []
        for leaf in sorted(
            {self._positions[v] for v in needs.leaves} | {leaf for leaf, at in self._owners.items() if at == stage}
        ):
            crossing = self._start.get((leaf, stage))
            inputs.append((self._jaxpr.invars[leaf], End(leaf, crossing)))
        loop, stacks = self._loop_equation(stage, inputs)
        inputs += [(v, End(crossing=self._late[v, stage])) for v in late.received]
        before = [equation for number, equation in sorted(needs.equations.items()) if number < self._loop.position]
        after = segments.in_order(stage, {n: e for n, e in needs.equations.items() if n > self._loop.position})
        outputs = [(atom, End(position)) for position, atom in sorted(late.outputs.items())]
        outputs += stacks
        outputs += [(variable, End(crossing=self._late[variable, target])) for variable, target in late.sent]
        equations = [*before, loop, *(equation for equation, _ in after)]
        jaxpr = _compat.make_closed_jaxpr(
            [variable for variable, _ in inputs], [atom for atom, _ in outputs], equations, self._loop.graph.jaxpr
        )
        at_input = {end.position: number for number, (_, end) in enumerate(inputs) if end.crossing is None}
        at_output = {end.position: number for number, (_, end) in enumerate(outputs) if end.crossing is None}
        pairs = tuple(
            (at_input[leaf], at_output[output]) for leaf, output in self._pairs.items() if self._owners[leaf] == stage
        )
        return StageProgram(
            jaxpr,
            len(before),
            tuple(end for _, end in inputs),
            tuple(end for _, end in outputs),
            tuple(self._bodies[stage].parts),
            tuple(segment for _, segment in after),
            pairs,
            len(self._bodies[stage].sums),
        )

    def _loop_equation(self, stage: int, inputs: list[tuple[Any, End]]) -> tuple[Any, list[tuple[Any, End]]]:
        """The stage's own loop; stacks of received values join its inputs, stacks of sent ones are returned."""
        loop, body, late = self._loop.loop, self._bodies[stage], self._updates.stages[stage]
        consts, _ = _compat.scan_arity(loop.equation.params)
        read = [value for value in self._loop.body.inputs if value in body.inputs]
        fixed = set(self._loop.body.inputs[:consts])
        carried = {self._loop.body.inputs[consts + number]: number for number in body.sums}
        fixed_read = [v for v in read if v in fixed]
        rows = [v for v in read if v not in fixed and v not in carried]
        operands = [self._operands[v] for v in fixed_read]
        invars = [self._inner_of[v] for v in fixed_read]
        outvars, results = [], []
        for value, number in sorted(carried.items(), key=lambda pair: pair[1]):
            old, new = body.sums[number]
            operands.append(self._operands[value])
            invars.append(old)
            outvars.append(new)
            results.append(late.results[number])
        operands += [self._operands[v] for v in rows]
        invars += [self._inner_of[v] for v in rows]
        for value, _ in sorted(body.received):
            crossing = self._micro[value, stage]
            stack = self._stack(self._made[value].aval)
            inputs.append((stack, End(crossing=crossing)))
            operands.append(stack)
            invars.append(self._made[value])
        for number, atom in sorted(body.stacked.items()):
            outvars.append(atom)
            results.append(late.results[number])
        stacks = []
        for value, target in sorted(body.sent):
            outvars.append(self._made[value])
            stack = self._stack(self._made[value].aval)
            results.append(stack)
            stacks.append((stack, End(crossing=self._micro[value, target])))
        closed = _compat.make_closed_jaxpr(invars, outvars, body.equations, self._loop.body.jaxpr)
        arity = (len(fixed_read), len(carried))
        return _compat.scan_equation(loop.equation, operands, results, closed, arity), stacks

    def _stack(self, aval: Any) -> Any:
        """A variable for the values of all microbatches."""
        return _compat.Var(_compat.aval_of(jax.ShapeDtypeStruct((self._loop.count, *aval.shape), aval.dtype)))


def _in(atom: Any, variables: set[Any]) -> bool:
    return isinstance(atom, _compat.Literal) or atom in variables


class _Segments:
    """Counts, for what is made after the microbatches, how many stages it has come by."""

    def __init__(self, updates: Updates) -> None:
        self._stages: tuple[Late, ...] = updates.stages
        self._known: dict[tuple[Any, int], int] = {}
        entries = [
            (order, number, stage, equation)
            for stage, late in enumerate(updates.stages)
            for number, (order, equation) in enumerate(late.equations)
        ]
        for _, _, stage, equation in sorted(entries, key=lambda entry: entry[:3]):
            segment = self.of_equation(equation, stage)
            self._known.update(((variable, stage), segment) for variable in equation.outvars)

    def of(self, variable: Any, stage: int) -> int:
        """The segment of a stage in which a variable is there; what no stage holds is there from the first."""
        source = self._stages[stage].received.get(variable)
        return self._known.get((variable, stage), 0) if source is None else 1 + self.of(variable, source)

    def of_equation(self, equation: Any, stage: int) -> int:
        """The segment in which a stage can run an equation."""
        atoms = [atom for atom in equation.invars if not isinstance(atom, _compat.Literal)]
        return max((self.of(atom, stage) for atom in atoms), default=0)

    def in_order(self, stage: int, anywhere: Mapping[int, Any]) -> list[tuple[Any, int]]:
        """A stage's equations after the loop with their segments, segment by segment.

        What could be computed ``anywhere`` (equations by number) is so when it is read first, not before.
        """
        entries = [(order, equation, True) for order, equation in self._stages[stage].equations]
        entries += [(float(number), equation, False) for number, equation in anywhere.items()]
        entries.sort(key=lambda entry: entry[0])
        last = max((self.of_equation(equation, stage) for _, equation, _ in entries), default=0)
        wanted: dict[Any, int] = {}
        placed = []
        for order, equation, is_held in reversed(entries):
            segment = self.of_equation(equation, stage)
            if not is_held:
                segment = max(segment, min((wanted.get(v, last) for v in equation.outvars), default=last))
            for atom in equation.invars:
                if not isinstance(atom, _compat.Literal):
                    wanted[atom] = min(segment, wanted.get(atom, last))
            placed.append((segment, order, equation))
        placed.reverse()
        placed.sort(key=lambda entry: entry[:2])
        return [(equation, segment) for segment, _, equation in placed]
