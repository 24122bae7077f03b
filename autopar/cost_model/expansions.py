"""Operators that XLA:CPU takes apart into loops and searches, which need arrays of their own.

    random bits, threefry     a loop that hashes two arrays of words where they are
    max pooling's gradient    a search for the greatest of each window, which carries where that is, then a scatter

Read off compiled programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost_model.array_list import ArrayList
from autopar.cost_model.nodes import Form, Tenant
from autopar.graph.ir import Operator
from autopar.schedule.spmd import Buffer, Run


def scattered_to_greatest(nodes: ArrayList, step: Run, inputs: tuple[int, ...]) -> None:
    """The gradient of a maximum over windows is a scatter to XLA:CPU, to where a search for the greatest came from.

    With every element it carries where that is, one number per dimension: as many arrays of 32-bit numbers are read, and
    as many are left, in which the scatter then finds its places.
    """
    operator, (source, searched) = step.operator, inputs
    tenant, (few, many) = nodes.tenant_of(operator), (nodes[one] for one in inputs)

    def whole_numbers(form: Form, reads: tuple[int, ...], count: int) -> int:
        number = nodes.add(form, reads, 4 * count, tenant, -1, operator)
        nodes[number].dtype = "int32"
        return number

    count = math.prod(few.shape)
    places = tuple(whole_numbers(Form.KERNEL, (), math.prod(many.shape)) for _ in many.shape)
    found = tuple(whole_numbers(Form.KERNEL, (searched, *places), count) for _ in many.shape)
    greatest = nodes.add(Form.KERNEL, (searched, *places), few.size_bytes, tenant, -1, operator)
    nodes.add(Form.LOOP, (*found, greatest), 0, tenant, -1, operator)
    indices = whole_numbers(Form.COSTLY, found, count * len(many.shape))
    key = ("zeros", many.shape, many.dtype)
    zeros = nodes.once(key, lambda: nodes.add(Form.KERNEL, (), many.size_bytes, tenant, step.results[0].value, None))
    nodes[zeros].is_zero, nodes[zeros].shape = True, many.shape
    nodes.buffer(Form.IN_PLACE, (nodes.own_copy(zeros), indices, source), step.results[0], tenant, operator)


def random_bits(nodes: ArrayList, step: Run, keys: tuple[int, ...]) -> None:
    """XLA:CPU hashes in a loop over two arrays of 32-bit words, which its consumers then mix as they need them."""
    operator, result = step.operator, step.results[0]
    after = _hashed(nodes, operator, (keys, keys), result)
    node = nodes[nodes.buffer(Form.CHEAP, after, result, nodes.tenant_of(operator), operator)]
    node.elementwise, node.unary = True, False


def threefry(nodes: ArrayList, step: Run) -> None:
    """The same loop over words that are given, each with its half of the key.

    Keys that are arrays the loop carries as well, with what they come to together, and swaps them in every round.
    """
    read = [() if buffer is None else (nodes.at[buffer],) for buffer in step.operands]
    given = [key + words for key, words in zip(read[:2], read[2:], strict=True)]
    after = _hashed(nodes, step.operator, given, step.results[0], tuple(key for pair in read[:2] for key in pair))
    for result, node in zip(step.results, after, strict=True):
        nodes.at[result] = node
        nodes[node].value = result.value


def _hashed(
    nodes: ArrayList,
    operator: Operator,
    given: Sequence[tuple[int, ...]],
    like: Buffer,
    keys: tuple[int, ...] = (),
) -> tuple[int, ...]:
    """Two arrays of words in the shape of ``like``: made from what is ``given``, then hashed where they are."""
    shape, tenant = nodes.shape_of(like), nodes.tenant_of(operator)

    def whole_numbers(reads: tuple[int, ...], count: int) -> int:
        return nodes.add(Form.KERNEL, reads, 4 * count, tenant, like.value, operator)

    halves = tuple(whole_numbers(reads, math.prod(shape)) for reads in given)
    most = max((math.prod(nodes[key].shape) for key in keys), default=1)
    carried = halves if most == 1 else (*halves, *(whole_numbers(keys, most) for _ in range(3)))
    held_bytes = sum(nodes[one].size_bytes for one in carried)
    next_round = nodes.add(Form.KERNEL, carried, held_bytes, Tenant.LOOP, like.value, operator)
    loop = nodes.add(Form.LOOP, (*carried, next_round), 0, Tenant.LOOP, -1, operator)
    after = tuple(
        nodes.add(Form.RENAME, (half, loop), nodes[half].size_bytes, tenant, like.value, operator) for half in halves
    )
    for number in (*halves, *after):
        nodes[number].shape = shape
    return after
