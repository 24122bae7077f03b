"""Which dimensions are the same dimension?

A dimension of size *n* is an ordered product of *atoms*, major first, whose sizes multiply to *n*. Saying that two
dimensions (or two runs of dimensions, as in a reshape) walk through memory together ties their atoms pairwise; where
the sizes differ the larger atom is split, so that both sides end in their *coarsest common refinement*:

    [4, 16] ~ [64]      →  64 = 4·16
    [8, 8]  ~ [4, 16]   →  4·(2·8) on one side, (4·2)·8 on the other: three atoms 4, 2, 8

Two lists of equal product can be cut at the same place exactly where prefix products meet after splitting by the
greatest common divisor; where the heads are coprime ([6, 4] ~ [4, 6] after the common 2) no cut is common and the atoms
up to the next meeting point are blocked.

Atoms form a union-find structure with marks; a mark put on an atom holds for all that it is tied to and for all its
parts. :meth:`Factoring.rule` reads the result as a :class:`~autopar.graph.ir.Rule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import Flag

from autopar.graph.ir import Factor, FactorKind, Rule

Atoms = tuple[int, ...]
Dims = tuple[Atoms, ...]

Place = tuple[int, int]
"""Where a factor stands: (operand, dimension)."""

KindOf = Callable[["Mark", tuple[Place, ...]], FactorKind]
"""The kind of a marked factor, given its mark and the operand dimensions that carry it."""


class Mark(Flag):
    """What an operator does to a dimension besides carrying it along.

    * ``BLOCKED``  it must see the dimension whole;
    * ``REDUCED``  it combines the dimension's elements (by a sum or anything else) and the result lacks it;
    * ``WRITTEN``  it puts updates at places of the dimension that run-time indices name.
    """

    NONE = 0
    BLOCKED = 1
    REDUCED = 2
    WRITTEN = 4


class Factoring:
    """Atoms, their ties and their marks (see the module docstring)."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._marks: list[Mark] = []
        self._parents: list[int] = []
        self._parts: dict[int, tuple[int, int]] = {}

    def atom(self, size: int, mark: Mark = Mark.NONE) -> int:
        """A new atom, tied to nothing."""
        self._sizes.append(size)
        self._marks.append(mark)
        self._parents.append(len(self._parents))
        return len(self._parents) - 1

    def dims(self, shape: Sequence[int], mark: Mark = Mark.NONE) -> Dims:
        """New atoms for an array: one for each dimension, none for a dimension of size 1."""
        return tuple(() if size == 1 else (self.atom(size, mark),) for size in shape)

    def leaves(self, atoms: Iterable[int]) -> Atoms:
        """The atoms as they stand now: each replaced by what it is tied to, or by its parts, major first."""
        stack = list(atoms)[::-1]
        found = []
        while stack:
            root = self._root(stack.pop())
            parts = self._parts.get(root)
            if parts is None:
                found.append(root)
            else:
                stack += parts[::-1]
        return tuple(found)

    def mark(self, atoms: Iterable[int], mark: Mark) -> None:
        """Add a mark to atoms."""
        for leaf in self.leaves(atoms):
            self._marks[leaf] |= mark

    def tie(self, left: Iterable[int], right: Iterable[int]) -> None:
        """Let two runs of atoms be one; where their sizes admit no common refinement, both are blocked."""
        left, right = tuple(left), tuple(right)
        if self._product(left) != self._product(right):
            self.mark(left + right, Mark.BLOCKED)
            return
        a, b = list(left[::-1]), list(right[::-1])
        while (x := self._pop(a)) is not None and (y := self._pop(b)) is not None:
            common = math.gcd(self._sizes[x], self._sizes[y])
            if self._sizes[x] == self._sizes[y]:
                self._union(x, y)
            elif common == 1:
                self._block_until_aligned(x, y, a, b)
            else:
                a += self._split(x, common)[::-1]
                b += self._split(y, common)[::-1]

    def rule(self, operands: Sequence[Dims], results: Sequence[Dims], kind_of: KindOf | None = None) -> Rule:
        """The factors of an operator with these operands and results.

        A factor that stands twice in one array, that a result lacks without its being reduced, or that a result still
        has although it was reduced, is blocked. ``kind_of`` names the kind of the other marked factors; without it they
        are blocked.
        """
        inside = [tuple(self.leaves(atoms) for atoms in dims) for dims in operands]
        outside = [tuple(self.leaves(atoms) for atoms in dims) for dims in results]
        order = {leaf: None for dims in (*inside, *outside) for atoms in dims for leaf in atoms}
        numbers = {leaf: number for number, leaf in enumerate(order)}
        for dims in inside + outside:
            self._block_repeated([leaf for atoms in dims for leaf in atoms])
        in_results = {leaf for dims in outside for atoms in dims for leaf in atoms}
        factors = []
        for leaf in order:
            places = tuple((k, d) for k, dims in enumerate(inside) for d, atoms in enumerate(dims) if leaf in atoms)
            factors.append(Factor(self._sizes[leaf], self._kind(leaf, places, leaf in in_results, kind_of)))

        def numbered(arrays: list[Dims]) -> tuple[Dims, ...]:
            return tuple(tuple(tuple(numbers[leaf] for leaf in atoms) for atoms in dims) for dims in arrays)

        return Rule(tuple(factors), numbered(inside), numbered(outside))

    def _block_repeated(self, leaves: Sequence[int]) -> None:
        """An atom that stands twice in one array: a device that holds one of its pieces would need all of the other."""
        for number, leaf in enumerate(leaves):
            if leaf in leaves[:number]:
                self._marks[leaf] |= Mark.BLOCKED

    def _kind(self, leaf: int, places: tuple[Place, ...], in_results: bool, kind_of: KindOf | None) -> FactorKind:
        mark = self._marks[leaf]
        lost = not in_results and Mark.REDUCED not in mark
        kept = in_results and Mark.REDUCED in mark
        if Mark.BLOCKED in mark or lost or kept or self._sizes[leaf] == 0:
            return FactorKind.BLOCKED
        if mark == Mark.NONE:
            return FactorKind.PARALLEL
        return kind_of(mark, places) if kind_of else FactorKind.BLOCKED

    def _root(self, atom: int) -> int:
        while self._parents[atom] != atom:
            self._parents[atom] = self._parents[self._parents[atom]]
            atom = self._parents[atom]
        return atom

    def _product(self, atoms: Iterable[int]) -> int:
        return math.prod(self._sizes[self._root(atom)] for atom in atoms)

    def _pop(self, stack: list[int]) -> int | None:
        """Take the next leaf; looked up only now, because ties made meanwhile may have split it."""
        while stack:
            root = self._root(stack.pop())
            parts = self._parts.get(root)
            if parts is None:
                return root
            stack += parts[::-1]
        return None

    def _union(self, x: int, y: int) -> None:
        self._parents[y] = x
        self._marks[x] |= self._marks[y]

    def _split(self, leaf: int, major: int) -> Atoms:
        size = self._sizes[leaf]
        if size == major:
            return (leaf,)
        parts = (self.atom(major, self._marks[leaf]), self.atom(size // major, self._marks[leaf]))
        self._parts[leaf] = parts
        return parts

    def _block_until_aligned(self, x: int, y: int, a: list[int], b: list[int]) -> None:
        left, right = self._sizes[x], self._sizes[y]
        self.mark((x, y), Mark.BLOCKED)
        while left != right:
            behind = a if left < right else b
            leaf = self._pop(behind)
            if leaf is None:
                return
            self.mark((leaf,), Mark.BLOCKED)
            if behind is a:
                left *= self._sizes[leaf]
            else:
                right *= self._sizes[leaf]
