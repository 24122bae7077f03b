"""Do arrays share bytes as XLA lets them: in a heap of fixed offsets, and in the bytes of results and donated arguments?

The orders in which XLA does both are held against compiled programs in ``test_memory``; here they are shown one by one.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.heap import PACKED_BUFFERS, Span, bytes_in_near_orders, packed_bytes
from autopar.cost_model.rooms import Room, Tenancy, without_lodgers

# --- offsets ----------------------------------------------------------------------------------------------------------

SPANS = st.lists(
    st.builds(
        lambda size, start, length: Span(size, start, start + length),
        st.integers(1, 50),
        st.integers(0, 30),
        st.integers(1, 10),
    ),
    max_size=25,
)


@given(SPANS)
def test_a_block_holds_what_lives_at_once_and_never_more_than_everything(found: list[Span]) -> None:
    assert len(found) <= PACKED_BUFFERS
    live = max((sum(s.size_bytes for s in found if s.start <= t < s.stop) for t in range(41)), default=0)
    assert live <= packed_bytes(found) <= sum(s.size_bytes for s in found)


@given(st.lists(st.integers(1, 50), max_size=10))
def test_buffers_of_different_times_share_one_place(sizes: list[int]) -> None:
    one_by_one = [Span(size, number, number + 1) for number, size in enumerate(sizes)]
    assert packed_bytes(one_by_one) == max(sizes, default=0)


def test_fixed_offsets_may_need_more_than_what_lives_at_once() -> None:
    """Five bytes live at most, but the biggest are placed first: the last then finds two holes of one byte, not of two."""
    spans = [Span(3, 0, 1), Span(2, 0, 2), Span(2, 1, 3), Span(1, 1, 2), Span(3, 2, 3)]
    assert max(sum(s.size_bytes for s in spans if s.start <= t < s.stop) for t in range(3)) == 5
    assert packed_bytes(spans) > 5


def test_of_equal_buffers_the_one_that_stays_longest_is_placed_first() -> None:
    """Three bytes live at most, and three would do if equal buffers were placed as they come."""
    spans = [Span(1, 5, 7, 0), Span(1, 3, 7, 1), Span(1, 1, 5, 2), Span(1, 4, 6, 3), Span(2, 1, 3, 4)]
    assert packed_bytes(spans) == 4


def test_of_arrays_in_one_place_the_first_says_how_long_it_stays() -> None:
    alone = [Span(2, 5, 8, 0), Span(1, 4, 6, 1), Span(2, 1, 4, 2), Span(1, 1, 5, 3)]
    assert packed_bytes(alone) == 4
    assert packed_bytes([Span(2, 5, 8, 0, handed_over=(6,)), *alone[1:]]) == 3


@given(SPANS)
def test_orders_like_the_one_foretold_need_no_less_and_the_same_each_time(found: list[Span]) -> None:
    safe = bytes_in_near_orders(found)
    assert packed_bytes(found) <= safe <= sum(s.size_bytes for s in found)
    assert safe == bytes_in_near_orders(found)


def test_holes_of_orders_like_the_one_foretold_are_allowed_for() -> None:
    """Three bytes live at once and need no more; were one to come a little earlier, it would part two that fit together."""
    tight = [Span(2, 4, 6), Span(1, 0, 2), Span(1, 3, 5), Span(2, 0, 1)]
    assert packed_bytes(tight) == 3
    assert bytes_in_near_orders(tight) == 4


@given(st.lists(st.integers(1, 50), max_size=10))
def test_what_lives_all_the_time_leaves_no_holes_in_any_order(sizes: list[int]) -> None:
    assert bytes_in_near_orders([Span(size, 0, 1) for size in sizes]) == sum(sizes)


# --- rooms ------------------------------------------------------------------------------------------------------------

RESULT, ARRAY, OTHER = 9, 1, 2
RANK = {ARRAY: 0, OTHER: 1, RESULT: 2}


def room_from(start: int, size_bytes: int = 8) -> Room:
    """The room of a result that is made at a time."""
    return Room(size_bytes, (Tenancy(RESULT, size_bytes, start, start),), RANK[RESULT])


@pytest.mark.parametrize(
    ("array", "overwrites", "lodges"),
    [
        (Tenancy(ARRAY, 8, 1, 4), {}, True),
        (Tenancy(ARRAY, 8, 1, 5), {}, False),  # read by what makes the result
        (Tenancy(ARRAY, 8, 1, 5), {RESULT: {ARRAY}}, True),  # which is written over it
        (Tenancy(ARRAY, 4, 1, 5), {RESULT: {ARRAY}}, False),  # only if it is of the same size
        (Tenancy(ARRAY, 16, 1, 4), {}, False),
    ],
)
def test_an_array_enters_a_room_that_is_empty_while_it_lives(
    array: Tenancy, overwrites: dict[int, set[int]], lodges: bool
) -> None:
    assert without_lodgers([array], [room_from(5)], overwrites, RANK) == ([] if lodges else [array])


def test_an_array_is_written_over_one_that_lodges() -> None:
    arrays = [Tenancy(ARRAY, 8, 1, 3), Tenancy(OTHER, 8, 3, 4)]
    assert without_lodgers(arrays, [room_from(5)], {OTHER: {ARRAY}}, RANK) == []
    assert without_lodgers(arrays, [room_from(5)], {}, RANK) == [arrays[1]]


def test_the_largest_enters_first_and_the_smallest_room() -> None:
    small, large = Tenancy(ARRAY, 4, 1, 4), Tenancy(OTHER, 8, 1, 4)
    assert without_lodgers([small, large], [room_from(5)], {}, RANK) == [small]
    assert without_lodgers([small, large], [room_from(5), room_from(5, 4)], {}, RANK) == []


def test_among_equals_the_one_whose_maker_is_read_first_enters() -> None:
    arrays = [Tenancy(OTHER, 8, 1, 3), Tenancy(ARRAY, 8, 2, 4)]
    assert without_lodgers(arrays, [room_from(5)], {}, RANK) == [arrays[0]]
