"""Which rows a step trains: whole passes, by the seed, and from the step alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from invrl.datasets.order import Draw, RowOrder, split_off

ORDERS = st.builds(
    RowOrder,
    num_rows=st.integers(1, 20),
    batch_size=st.integers(1, 25),
    epochs=st.integers(0, 3),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
)


def draws_of(order: RowOrder, steps: range) -> list[Draw]:
    return [draw for step in steps for draw in order.batch(step)]


@given(ORDERS)
def test_every_epoch_has_every_row_once(order: RowOrder) -> None:
    last = order.last_step(num_steps=7)
    draws = draws_of(order, range(1, last + 1))
    assert all(len(order.batch(step)) == order.batch_size for step in range(1, last))
    if order.epochs:
        assert len(draws) == order.num_rows * order.epochs
        assert order.batch(last), "the last step has rows"
    by_epoch = Counter(draw.epoch for draw in draws)
    for epoch in list(by_epoch)[:-1] if not order.epochs else by_epoch:
        rows = [draw.index for draw in draws if draw.epoch == epoch]
        assert sorted(rows) == list(range(order.num_rows))
    assert [draw.epoch for draw in draws] == sorted(draw.epoch for draw in draws)


def test_rows_are_in_file_order_or_shuffled_by_the_seed() -> None:
    order = RowOrder(num_rows=50, batch_size=50, epochs=2, shuffle=False, seed=0)
    assert [draw.index for draw in order.batch(1)] == list(range(50))
    shuffled = replace(order, shuffle=True)
    other_seed = replace(shuffled, seed=1)
    orders = [
        tuple(draw.index for draw in shuffled_order.batch(step))
        for shuffled_order in (shuffled, other_seed)
        for step in (1, 2)
    ]
    assert len({tuple(range(50)), *orders}) == 5, (
        "each pass and each seed has an order of its own"
    )
    assert shuffled.batch(2) == replace(order, shuffle=True).batch(2)


@given(st.integers(2, 200), st.floats(0.001, 0.9), st.integers(0, 5))
def test_held_out_rows_are_not_trained(
    num_rows: int, fraction: float, seed: int
) -> None:
    kept, held_out = split_off(num_rows, fraction, seed)
    assert sorted([*kept, *held_out]) == list(range(num_rows))
    assert len(held_out) == max(1, round(num_rows * fraction))
    assert split_off(num_rows, fraction, seed) == (kept, held_out)
