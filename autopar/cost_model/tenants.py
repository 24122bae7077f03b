"""Whose are a step's bytes?  Arguments by the trees that they belong to, scratch buffers by the user's line.

Parameters are the state that the forward or backward pass reads.  State whose paths end like those of the parameters
(moments, averages, accumulated gradients) forms trees of the same shape, told by what stands before: from
``state/params/layer0/kernel`` and ``state/opt/mu/layer0/kernel`` come the trees ``state/params`` and ``state/opt/mu``.
Within a tree, arrays alike up to a layer's number are one family; a family that has most of its tree's bytes is named
itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from autopar.cost_model.nodes import Node
from autopar.graph.ir import Graph, Phase
from autopar.schedule.spmd import SpmdProgram
from autopar.wording import array_text, families, family_name, slashed, source_text

MOST_TENANTS = 12

OWN_SHARE = 0.5
"""A family with this share of its tree's bytes is a tenant of its own."""

Path = tuple[str, ...]
Tenants = dict[str, tuple[int, int]]
"""Bytes and number of arrays by name."""


def largest_tenants(
    scratch: Iterable[tuple[Node, int]],
    program: SpmdProgram,
    state_pairs: tuple[tuple[int, int], ...],
    arguments: Sequence[int],
    names: Mapping[int, str],
) -> tuple[tuple[str, int], ...]:
    """Names and bytes of the biggest tenants, of ``arguments`` (bytes by position) and of ``scratch`` at its peak.

    ``names`` are the paths of the graph's inputs by value; what has none is one tenant.
    """
    tenants = {**_arguments(program.graph, state_pairs, arguments, names), **_scratch(scratch, program)}
    heaviest = sorted(tenants.items(), key=lambda item: -item[1][0])[:MOST_TENANTS]
    return tuple((f"{name} ({count} arrays)" if count > 1 else name, size) for name, (size, count) in heaviest if size)


def _arguments(
    graph: Graph, state_pairs: tuple[tuple[int, int], ...], arguments: Sequence[int], names: Mapping[int, str]
) -> Tenants:
    early = {operand for operator, _ in graph.all_operators() if operator.phase is not Phase.UPDATE
             for operand in operator.operands}  # fmt: skip
    path_of = {value: tuple(slashed(names[value]).split("/")) for value in graph.inputs if value in names}
    state = [graph.inputs[source] for source, _ in state_pairs]
    parameters = [path_of[value] for value in state if value in early and value in path_of]
    tree_of = trees([path_of[value] for value in state if value in path_of], parameters)
    holding_parameters = {tree_of[path] for path in parameters}
    nameless = [size for value, size in zip(graph.inputs, arguments, strict=True) if value not in path_of]
    by_tree: dict[Path, dict[str, int]] = {}
    for value, size in zip(graph.inputs, arguments, strict=True):
        if value in path_of:
            path = path_of[value]
            by_tree.setdefault(tree_of.get(path, path[:1]), {})["/".join(path)] = size
    found: Tenants = {"arguments without a name": (sum(nameless), len(nameless))} if nameless else {}
    for tree, leaves in by_tree.items():
        kind = "parameters" if tree in holding_parameters else "optimizer state" if tree in tree_of.values() else ""
        found.update(_of_tree(kind, "/".join(tree), leaves))
    return found


def trees(state: Iterable[Path], parameters: Sequence[Path]) -> dict[Path, Path]:
    """The tree of each path of the state that ends like a parameter."""
    if not parameters:
        return {}
    shared = min(map(len, parameters)) - 1
    while any(path[:shared] != parameters[0][:shared] for path in parameters):
        shared -= 1
    tails = {path[shared:] for path in parameters}
    found = {}
    for path in state:
        start = next((k for k in range(len(path)) if path[k:] in tails), None)
        if start is not None:
            found[path] = path[:start]
    return found


def _of_tree(kind: str, tree: str, leaves: Mapping[str, int]) -> Tenants:
    """The tree as one tenant, or the family that has most of it, and the rest."""
    whole = sum(leaves.values())
    own = [members for _, members in families(leaves) if sum(leaves[path] for path in members) >= OWN_SHARE * whole]
    found = {family_name(members): (sum(leaves[path] for path in members), len(members)) for members in own}
    rest = leaves.keys() - {path for members in own for path in members}
    if rest:
        name = f"{kind} in {tree}" if kind else tree
        found[f"the rest of {name}" if found else name] = sum(leaves[path] for path in rest), len(rest)
    return found


def _scratch(scratch: Iterable[tuple[Node, int]], program: SpmdProgram) -> Tenants:
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for node, size in scratch:
        value, source = program.values.get(node.value), node.source
        array = "" if value is None else f" {array_text(value.shape, value.dtype)}"
        place = "" if source is None else f" by {source.primitive} at {source_text(str(source.source))}"
        name = f"{node.tenant.value}{array}{place}"
        sizes[name] += size
        counts[name] += 1
    return {name: (size, counts[name]) for name, size in sizes.items()}
