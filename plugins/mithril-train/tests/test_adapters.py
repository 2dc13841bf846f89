"""Loaders of other libraries: batches, epochs, order, resuming in the middle."""

import numpy as np
import pytest
from small import X, Y, arrays, loader, trainer

from mithril.graph import InputError
from mithril_train.engine.adapters import GrainLoader, Loader, MithrilLoader, as_loader


def taken(source, n=None):
    records = []
    for batch in source.batches():
        records.append(np.asarray(batch[0] if isinstance(batch, (list, tuple)) else batch).tolist())
        if len(records) == n:
            break
    return records


def torch_loader():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y).long())
    return torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)


def test_torch_loaders_train_and_are_reproducible():
    resumed, again = trainer(), trainer()
    resumed.fit(torch_loader(), 2)
    again.fit(torch_loader(), 2)
    assert resumed.history.steps == again.history.steps
    assert len(resumed.history.steps) == 12


def test_torch_loaders_resume_in_the_middle(tmp_path):
    reference, first, second = trainer(), trainer(), trainer()
    reference.fit(torch_loader(), 2)
    from test_trainer import KillAt, Killed

    import mithril as ml

    with pytest.raises(Killed):
        first.fit(torch_loader(), 2, callbacks=[ml.Checkpoint(tmp_path, every=1), KillAt(9)])
    second.fit(torch_loader(), 2, resume=tmp_path)
    assert second.history.steps == reference.history.steps
    for n, x in arrays(reference).items():
        np.testing.assert_array_equal(arrays(second)[n], x)


def test_any_list_of_batches_is_a_loader():
    source = as_loader([[1], [2], [3]], 0)
    assert type(source) is Loader
    assert taken(source, 2) == [1, 2]
    other = as_loader([[1], [2], [3]], 0)
    other.load_state(source.state(), 0)
    assert taken(other) == [3]
    assert (other.epoch, other.samples) == (1, 0)


def test_each_epoch_calls_a_generator_function():
    def batches():
        yield from ([1], [2], [3])

    source = as_loader(batches, 0)
    assert taken(source) == [1, 2, 3]
    assert taken(source, 2) == [1, 2]
    with pytest.raises(InputError, match="has no epochs\nhint: .* or the generator function, without calling it"):
        as_loader(batches(), 0)


def test_samplers_receive_the_epoch():
    class Told(list):
        epochs = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

    source = as_loader(Told([[1]]), 0)
    taken(source)
    taken(source)
    assert Told.epochs == [0, 1]


def test_evaluating_does_not_move_a_loader():
    source = loader()
    subject = trainer()
    subject.fit(source, 1)
    before = source.state_dict()
    subject.evaluate(source)
    assert source.state_dict() == before
    assert type(as_loader(source, 0)) is MithrilLoader


class GrainLike:
    """The part of grain that the adapter uses: iterators with get_state and set_state."""

    def __init__(self, n, as_bytes):
        self.n, self.as_bytes = n, as_bytes

    def __iter__(self):
        return GrainIterator(self)


class GrainIterator:
    def __init__(self, loader):
        self.loader, self.k = loader, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.k == self.loader.n:
            raise StopIteration
        self.k += 1
        return self.k

    def get_state(self):
        return str(self.k).encode() if self.loader.as_bytes else {"next": self.k}

    def set_state(self, state):
        self.k = int(state) if self.loader.as_bytes else state["next"]


@pytest.mark.parametrize("as_bytes", [False, True])
def test_grain_loaders_resume_from_their_own_state(as_bytes):
    import json

    source = GrainLoader(GrainLike(5, as_bytes), 0)
    batches = source.batches()
    assert [next(batches), next(batches)] == [1, 2]
    saved = json.loads(json.dumps(source.state()))
    other = GrainLoader(GrainLike(5, as_bytes), 0)
    other.load_state(saved, 0)
    assert taken(other) == [3, 4, 5]
    assert other.state()["epoch"] == 1
    assert taken(other) == [1, 2, 3, 4, 5]


def test_a_real_grain_loader():
    grain = pytest.importorskip("grain")
    data = grain.MapDataset.source(list(range(12))).batch(4)
    source = as_loader(data.to_iter_dataset(), 0)
    assert type(source) is GrainLoader
    assert taken(source) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
