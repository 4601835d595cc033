"""Which rows a step trains: whole passes, by the seed, and from the step alone."""

from __future__ import annotations

from collections import defaultdict
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


def draws_of(order: RowOrder, last_step: int) -> list[Draw]:
    draws: list[Draw] = []
    for step in range(1, last_step + 1):
        draws += order.batch(step)
    return draws


def rows_of(order: RowOrder, step: int) -> list[int]:
    return [draw.index for draw in order.batch(step)]


@given(ORDERS)
def test_every_epoch_has_every_row_once(order: RowOrder) -> None:
    last_step = order.last_step(num_steps=7)
    draws = draws_of(order, last_step)
    rows_by_epoch: defaultdict[int, list[int]] = defaultdict(list)
    for draw in draws:
        rows_by_epoch[draw.epoch].append(draw.index)
    *whole, last = rows_by_epoch.values()
    if order.epochs:
        assert len(draws) == order.num_rows * order.epochs
        whole.append(last)
    for rows in whole:
        assert sorted(rows) == list(range(order.num_rows))
    epochs = [draw.epoch for draw in draws]
    assert epochs == sorted(epochs)


@given(ORDERS)
def test_only_the_last_batch_can_be_smaller(order: RowOrder) -> None:
    last_step = order.last_step(num_steps=7)
    for step in range(1, last_step):
        assert len(order.batch(step)) == order.batch_size
    if order.epochs:
        assert order.batch(last_step), "the last step has rows"


def test_unshuffled_rows_are_in_file_order() -> None:
    order = RowOrder(
        num_rows=50,
        batch_size=50,
        epochs=2,
        shuffle=False,
        seed=0,
    )
    assert rows_of(order, step=1) == list(range(50))


def test_each_pass_and_each_seed_shuffles_in_an_order_of_its_own() -> None:
    first_seed = RowOrder(
        num_rows=50,
        batch_size=50,
        epochs=2,
        shuffle=True,
        seed=0,
    )
    second_seed = replace(first_seed, seed=1)
    orders = {
        tuple(range(50)),
        tuple(rows_of(first_seed, step=1)),
        tuple(rows_of(first_seed, step=2)),
        tuple(rows_of(second_seed, step=1)),
        tuple(rows_of(second_seed, step=2)),
    }
    assert len(orders) == 5
    same_seed = replace(second_seed, seed=0)
    assert same_seed.batch(2) == first_seed.batch(2)


@given(
    num_rows=st.integers(2, 200),
    fraction=st.floats(0.001, 0.9),
    seed=st.integers(0, 5),
)
def test_held_out_rows_are_not_trained(
    num_rows: int,
    fraction: float,
    seed: int,
) -> None:
    kept, held_out = split_off(num_rows, fraction, seed)
    assert sorted([*kept, *held_out]) == list(range(num_rows))
    assert len(held_out) == max(1, round(num_rows * fraction))
    again = split_off(num_rows, fraction, seed)
    assert again == (kept, held_out)
