"""Data sets: lists are rows, a collate of the user's sees every kind, wrong data are named."""

import numpy as np
import pytest
from small import X, Y, trainer

import mithril as ml
from mithril.graph.errors import InputError, OptionError

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


class Items:
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, k):
        return self.items[k]


@pytest.mark.parametrize("size", [3, 4])
def test_lists_are_rows(size):
    """Also where the batch has as many rows as columns, and a transposed batch would have the same shape."""
    rows = ROWS[:size].tolist()
    for data in (rows, Items(rows), lambda: iter(rows)):
        (batch,) = ml.DataLoader(data, batch_size=size)
        np.testing.assert_array_equal(batch, ROWS[:size])
        assert batch.dtype == np.float32
    for data in (Items([{"x": r, "y": k} for k, r in enumerate(rows)]), lambda: ({"x": r, "y": 1} for r in rows)):
        (batch,) = ml.DataLoader(data, batch_size=size)
        np.testing.assert_array_equal(batch["x"], ROWS[:size])
    (batch,) = ml.DataLoader(Items([(r, k) for k, r in enumerate(rows)]), batch_size=size)
    np.testing.assert_array_equal(batch[0], ROWS[:size])
    np.testing.assert_array_equal(batch[1], np.arange(size))


def test_deep_lists_are_rows():
    deep = ROWS.reshape(2, 2, 3)
    (batch,) = ml.DataLoader(deep.tolist(), batch_size=2)
    np.testing.assert_array_equal(batch, deep)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([[1, [2, 3]], [4, [5, 6]]], "return a tuple or a dictionary"),
        ([(1, 2), (1, 2, 3)], "different numbers of columns"),
        ([{"a": 1}, {"b": 1}], "different columns"),
        ([[1, 2], [1, 2, 3]], "different shapes"),
    ],
)
def test_samples_that_differ_are_rejected(items, message):
    with pytest.raises(InputError, match=message):
        list(ml.DataLoader(Items(items), batch_size=2))


KINDS = {
    "array": ROWS,
    "tuple": (ROWS, np.arange(4)),
    "dictionary": {"x": ROWS, "y": np.arange(4)},
    "items": Items([(r, k) for k, r in enumerate(ROWS)]),
    "list": ROWS.tolist(),
    "generator": lambda: iter(ROWS),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_collate_sees_the_samples_of_every_kind_of_data(kind, workers):
    seen = []

    def collate(samples):
        seen.append(samples)
        return {"input": np.zeros(len(samples), np.float32)}

    batches = list(ml.DataLoader(KINDS[kind], batch_size=3, collate=collate, num_workers=workers))
    assert [len(b["input"]) for b in batches] == [3, 1]
    samples = [s for group in sorted(seen, key=len, reverse=True) for s in group]
    assert all(isinstance(group, list) for group in seen)
    for sample, row in zip(samples, ROWS, strict=True):
        first = sample["x"] if kind == "dictionary" else sample[0] if kind in ("tuple", "items") else sample
        np.testing.assert_array_equal(first, row)


def test_augmentation_of_arrays_reaches_the_model():
    def zeros(samples):
        return np.stack([x * 0 for x, _ in samples]), np.array([y for _, y in samples])

    subject = trainer(optimizer=ml.SGD(0.0))
    augmented = subject.evaluate(ml.DataLoader((X, Y), batch_size=96, collate=zeros))
    assert augmented == subject.evaluate((X * 0, Y)) != subject.evaluate((X, Y))


class Frame:
    iloc = None


@pytest.mark.parametrize(("data", "message"), [(Frame(), "to_numpy"), ("abc", "np.load"), (3, "is not a dataset")])
def test_data_that_cannot_be_read_are_named(data, message):
    with pytest.raises(InputError, match=message):
        ml.DataLoader(data)


def test_sampler_that_can_be_read_once_is_rejected():
    with pytest.raises(OptionError, match="only once"):
        ml.DataLoader(ROWS, sampler=iter([1, 2]))
    assert len(ml.DataLoader(ROWS, sampler=[1, 2], batch_size=2)) == 1
