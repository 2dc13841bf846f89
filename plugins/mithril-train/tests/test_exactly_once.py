"""Every sample of an epoch is seen once, although training is interrupted and resumes with other batches."""

import json
from collections import Counter

import numpy as np
import pytest

import mithril as ml
from mithril.models import Linear, Model
from mithril_train.engine.adapters import GrainLoader, as_loader
from mithril_train.engine.batches import LocalRows

N = 103
DRAW = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
DATA = {"input": DRAW, "target": DRAW[:, :1], "id": np.arange(N, dtype=np.int32)}


class Stopped(Exception):
    pass


class Seen(ml.Callback):
    """Notes the samples of every step, and raises after some steps, of which the last one is saved."""

    def __init__(self, stop=None):
        self.ids, self.sizes, self.stop = [], [], stop

    def batch_begin(self, trainer, batch):
        if len(self.sizes) == self.stop:
            raise Stopped
        self.batch = np.asarray(trainer.engine._numpy(batch["id"])).tolist()

    def batch_end(self, trainer, report):
        self.ids += self.batch
        self.sizes.append(len(self.batch))


def fresh(folder, backend="numpy"):
    return ml.Trainer(
        Model.create(outputs={"y": Linear(1)(ml.IOKey("input"))}),
        ml.SGD(0.01),
        loss=lambda y, target: ml.ops.mse_loss(y, target),
        backend=backend,
        seed=3,
        callbacks=[ml.Checkpoint(folder, every=1)],
        progress=False,
    )


def interrupted(folder, first, second, steps, epochs=1, backend="numpy", **options):
    """Train with one loader, stop, and resume with another one; return the samples of both."""
    before, after = Seen(steps), Seen()
    with pytest.raises(Stopped):
        fresh(folder).fit(first, epochs, callbacks=[before], **options)
    fresh(folder, backend).fit(second, epochs, callbacks=[after], resume=folder, **options)
    return before, after


def loader(batch_size, **options):
    return ml.DataLoader(DATA, batch_size, **{"shuffle": True, "seed": 1, **options})


def expect_once(ids, epochs=1, missing=0):
    for k in range(epochs):
        counts = Counter(ids[k * (N - missing) : (k + 1) * (N - missing)])
        assert set(counts.values()) == {1}
        assert len(counts) == N - missing
    assert len(ids) == epochs * (N - missing)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("first", "second"), [(8, 4), (4, 8), (8, 8), (7, 50), (50, 1), (8, 200)])
def test_other_batch_sizes(tmp_path, first, second, shuffle):
    """Resume in the middle of an epoch, with a smaller or larger batch."""
    loaders = [loader(size, shuffle=shuffle) for size in (first, second)]
    before, after = interrupted(tmp_path, *loaders, steps=2)
    expect_once(before.ids + after.ids)
    assert max(after.sizes) == min(second, N - 2 * first)
    assert before.ids + after.ids == loader(1, shuffle=shuffle).order(0).tolist(), (
        "the order does not depend on batches"
    )


@pytest.mark.parametrize("steps", [13, 15])
def test_borders_and_later_epochs(tmp_path, steps):
    before, after = interrupted(tmp_path, loader(8), loader(20), steps, epochs=3)
    expect_once(before.ids + after.ids, 3)


@pytest.mark.parametrize(
    "options", [{"num_workers": 2}, {"num_workers": 1, "worker": "process"}], ids=["threads", "processes"]
)
def test_other_workers(tmp_path, options):
    before, after = interrupted(tmp_path, loader(8), loader(4, **options), 3)
    expect_once(before.ids + after.ids)
    before, after = interrupted(tmp_path / "back", loader(4, **options), loader(8), 3)
    expect_once(before.ids + after.ids)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_other_engines(tmp_path, usable, backend):
    usable(backend)
    before, after = interrupted(tmp_path, loader(8), loader(16), 3, backend=backend)
    expect_once(before.ids + after.ids)


def test_between_the_last_step_of_an_epoch_and_its_end(tmp_path):
    """Resume without a batch: the end of the epoch saves the parameters of the checkpoint."""

    class Stops(ml.Checkpoint):
        def step_end(self, trainer, report):
            super().step_end(trainer, report)
            if trainer.steps == 13:
                raise Stopped

    subject, undisturbed, seen = fresh(tmp_path), fresh(tmp_path / "undisturbed"), Seen()
    with pytest.raises(Stopped):
        fresh(tmp_path / "unused").fit(loader(8), callbacks=[Stops(tmp_path, every=1)])
    subject.fit(loader(8), callbacks=[seen], resume=tmp_path)
    undisturbed.fit(loader(8))
    assert not seen.ids
    assert (subject.epoch, subject.steps) == (1, 13)
    assert subject.history.rows == undisturbed.history.rows
    for name, x in undisturbed.params.items():
        np.testing.assert_array_equal(subject.params[name], x)


def test_drop_last(tmp_path):
    before, after = interrupted(tmp_path, loader(8, drop_last=True), loader(10, drop_last=True), 3)
    assert Counter(before.ids + after.ids).most_common(1)[0][1] == 1
    assert len(before.ids + after.ids) == 24 + 70


def test_steps_per_epoch(tmp_path):
    """Count the epochs of the data, which end elsewhere than those of training."""
    before, after = interrupted(tmp_path, loader(8), loader(4), 7, epochs=6, steps_per_epoch=5)
    expect_once((before.ids + after.ids)[:N])
    assert sum(map(len, (before.sizes, after.sizes))) == 30
    subject, seen = fresh(tmp_path / "other"), Seen()
    for _ in range(3):
        subject.fit(loader(8), 1, callbacks=[seen], steps_per_epoch=4)
    assert seen.ids == loader(1).order(0)[:96].tolist(), "another fit continues in the epoch of the data"


def stream():
    yield from ({name: x[k] for name, x in DATA.items()} for k in range(N))


@pytest.mark.parametrize("workers", [0, 2])
def test_streams(tmp_path, workers):
    loaders = ml.DataLoader(stream, 8), ml.DataLoader(stream, 5, num_workers=workers)
    before, after = interrupted(tmp_path, *loaders, 3)
    expect_once(before.ids + after.ids)


def batches(size):
    return [{name: x[k : k + size] for name, x in DATA.items()} for k in range(0, N, size)]


@pytest.mark.parametrize(("first", "second"), [(8, 5), (5, 8)])
def test_any_list_of_batches(tmp_path, first, second):
    before, after = interrupted(tmp_path, batches(first), batches(second), 3)
    expect_once(before.ids + after.ids)
    assert after.sizes[0] == second - 3 * first % second


def test_rows_of_processes():
    """Resume four processes as two, and two as one: together they read the rest of the epoch."""
    samples = []
    state = None
    for world, size, steps in ((4, 8, 3), (2, 6, 4), (1, 5, None)):
        parts = []
        for rank in range(world):
            part = loader(size, rank=rank, world=world) if world > 1 else loader(size)
            if state is not None:
                part.load_state_dict(state)
            iterator = iter(part)
            parts.append([next(iterator) for _ in range(steps)] if steps else list(iterator))
            if steps:
                last = part.state_dict()
        state = json.loads(json.dumps(last))
        samples += [k for group in zip(*parts, strict=True) for b in group for k in b["id"].tolist()]
    expect_once(samples)


def test_other_data_is_refused(tmp_path):
    with pytest.raises(Stopped):
        fresh(tmp_path).fit(loader(8), 2, callbacks=[Seen(3)])
    shorter = {name: x[:90] for name, x in DATA.items()}
    changed = {**DATA, "target": DATA["target"] + 1}
    for other, names in (
        (
            ml.DataLoader(shorter, 8, shuffle=True, seed=1),
            "content, length\n  content: saved .*\n  length: saved 103, here 90",
        ),
        (ml.DataLoader(changed, 8, shuffle=True, seed=1), "content"),
        (loader(8, seed=2), "seed"),
        (loader(8, shuffle=False), "shuffle"),
    ):
        with pytest.raises(ml.InputError, match=f"the position in the data belongs to other data: {names}"):
            fresh(tmp_path).fit(other, 2, resume=tmp_path)
    with pytest.raises(ml.OptionError, match=r"another kind of loader\n.*saved by MithrilLoader, here Portions"):
        fresh(tmp_path).fit(loader(8), 2, resume=tmp_path, steps_per_epoch=3)
    subject, seen = fresh(tmp_path), Seen()
    subject.load(next(tmp_path.glob("*.safetensors")))
    subject.fit(loader(8, seed=2), 1, callbacks=[seen])
    expect_once(seen.ids)
    assert "the rest of the interrupted epoch is left" in str(subject.engine.decisions)


def test_lists_that_are_shorter_are_refused(tmp_path):
    with pytest.raises(Stopped):
        fresh(tmp_path).fit(batches(8), callbacks=[Seen(9)])
    with pytest.raises(ml.InputError, match="length: saved 103, here 40"):
        fresh(tmp_path).fit(batches(8)[:5], resume=tmp_path)
    source = as_loader(Repeated(batches(8)), 0)
    saved = {**source.state(), "samples": 72}
    short = as_loader(Repeated(batches(8)[:5]), 0)
    short.load_state(saved, 0)
    with pytest.raises(ml.InputError, match="the data has 32 samples fewer"):
        list(short.batches())


class Repeated:
    """An iterable of unknown length."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def test_buckets_keep_their_batch_size_inside_an_epoch():
    lengths = [1 + k % 7 for k in range(N)]

    def bucketed(size):
        return loader(size, buckets=ml.Buckets(lengths, [3, 7]))

    first = bucketed(8)
    iterator = iter(first)
    seen = [k for _ in range(4) for k in next(iterator)["id"].tolist()]
    again = bucketed(8)
    again.load_state_dict(first.state_dict())
    expect_once(seen + [k for b in again for k in b["id"].tolist()])
    with pytest.raises(ml.OptionError, match="batch size and sizes saved"):
        bucketed(4).load_state_dict(first.state_dict())
    bucketed(4).load_state_dict(again.state_dict())


def test_samplers_repeat_their_order():
    class Random:
        def __iter__(self):
            return iter(np.random.default_rng().permutation(N))

    def sampled(sampler):
        return ml.DataLoader(DATA, 8, sampler=sampler)

    order = np.random.default_rng(0).permutation(N).tolist()
    first = sampled(order)
    iterator = iter(first)
    seen = next(iterator)["id"].tolist()
    second = ml.DataLoader(DATA, 5, sampler=order)
    second.load_state_dict(first.state_dict())
    expect_once(seen + [k for b in second for k in b["id"].tolist()])
    drawn = sampled(Random())
    next(iter(drawn))
    other = sampled(Random())
    other.load_state_dict(drawn.state_dict())
    with pytest.raises(ml.InputError, match="the sampler gives another order"):
        list(other)


# -- loaders of other libraries ----------------------------------------------------------------------------------------
class Rows:
    """A data set that worker processes can import."""

    def __len__(self):
        return N

    def __getitem__(self, k):
        return {name: x[k] for name, x in DATA.items()}


def torch_loader(size, kind="shuffle", **options):
    data = pytest.importorskip("torch").utils.data
    rows = Rows()
    if kind == "sampler":
        return data.DataLoader(rows, batch_size=size, sampler=data.SubsetRandomSampler(range(N)))
    if kind == "batch_sampler":
        return data.DataLoader(rows, batch_sampler=data.BatchSampler(data.RandomSampler(rows), size, False))
    return data.DataLoader(rows, batch_size=size, shuffle=True, **options)


@pytest.mark.parametrize("kind", ["shuffle", "sampler", "batch_sampler"])
def test_torch_loaders(tmp_path, kind):
    before, after = interrupted(tmp_path, torch_loader(8, kind), torch_loader(5, kind), 15, epochs=2)
    expect_once(before.ids + after.ids, 2)


def test_torch_loaders_with_workers(tmp_path):
    before, after = interrupted(
        tmp_path, torch_loader(8), torch_loader(8, num_workers=1, multiprocessing_context="spawn"), 3
    )
    expect_once(before.ids + after.ids)


def test_distributed_samplers():
    """Resume two processes as three; torch repeats samples so that all processes have as many."""
    data, rows = pytest.importorskip("torch").utils.data, Rows()

    def part(size, rank, world):
        sampler = data.DistributedSampler(rows, world, rank, seed=5)
        return as_loader(data.DataLoader(rows, batch_size=size, sampler=sampler), 0)

    def read(source, count=None):
        ids = []
        for batch in source.batches():
            assert isinstance(batch, LocalRows)
            ids.append(batch.batch["id"].tolist())
            if len(ids) == count:
                break
        return ids

    first, second = [part(6, k, 2) for k in range(2)], [part(5, k, 3) for k in range(3)]
    for source in first:
        source.load_state(None, 0, world=2)
    seen = [k for source in first for ids in read(source, 3) for k in ids]
    state = json.loads(json.dumps(first[0].state()))
    assert state["samples"] == 36
    for source in second:
        source.load_state(state, 0, world=3)
    rest = [read(source) for source in second]
    assert {tuple(map(len, ids)) for ids in rest} == {(3, 5, 5, 5, 5)}
    seen += [k for ids in rest for batch in ids for k in batch]
    assert set(seen) == set(range(N))
    assert len(seen) == 105, "three processes need a multiple of three"
    five = part(5, 0, 5)
    five.load_state(state, 0, world=5)
    with pytest.raises(ml.InputError, match="cannot be divided over 5 processes"):
        list(five.batches())


def test_rows_divided_by_others_need_the_same_processes():
    source = as_loader([LocalRows({"x": np.zeros((4, 1))})] * 3, 0)
    source.load_state(None, 0, world=2)
    next(source.batches())
    assert source.state()["samples"] == 8
    other = as_loader([LocalRows({"x": np.zeros((4, 1))})] * 3, 0)
    with pytest.raises(ml.MithrilError, match="other data: length|processes: saved 2, here 3"):
        other.load_state(source.state(), 0, world=3)


class Grain:
    """The part of grain that the adapter uses; its state counts batches."""

    def __init__(self, size):
        self.items = batches(size)

    def __iter__(self):
        return GrainIterator(self.items)


class GrainIterator:
    def __init__(self, items):
        self.items, self.k = items, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.k == len(self.items):
            raise StopIteration
        self.k += 1
        return self.items[self.k - 1]

    def get_state(self):
        return {"next": self.k}

    def set_state(self, state):
        if state["next"] > len(self.items):
            raise ValueError("no such element")
        self.k = state["next"]


def test_grain_keeps_its_batch_size_inside_an_epoch():
    source = GrainLoader(Grain(8), 0)
    iterator = source.batches()
    seen = [k for _ in range(3) for k in next(iterator)["id"].tolist()]
    saved = json.loads(json.dumps(source.state()))
    assert saved["samples"] == 24
    again = GrainLoader(Grain(8), 0)
    again.load_state(saved, 0)
    expect_once(seen + [k for b in again.batches() for k in b["id"].tolist()])
    with pytest.raises(ml.OptionError, match="batches of the same size: saved 8, here 4"):
        GrainLoader(Grain(4), 0).load_state(saved, 0)
    border = GrainLoader(Grain(4), 0)
    border.load_state(again.state(), 0)
    assert (border.epoch, border.samples) == (1, 0)


def test_tar_streams_tell_their_files():
    first, other = ml.TarStream("train-{0..1}.tar", shuffle=4), ml.TarStream("train-{0..2}.tar", shuffle=4)
    copy = ml.TarStream("elsewhere/train-{0..1}.tar", shuffle=4)
    assert first.fingerprint() == copy.fingerprint() != other.fingerprint()
    state = ml.DataLoader(first, 4).state_dict()
    with pytest.raises(ml.InputError, match="other data: content"):
        ml.DataLoader(other, 4).load_state_dict(state)
