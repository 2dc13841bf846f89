"""Transforms on every kind of data set, tables, streams of tar files, padding and buckets; all of it resumes."""

import importlib
import importlib.util
import io
import json
import tarfile

import numpy as np
import pytest
from small import X, Y, arrays, trainer

import mithril as ml
from mithril.graph.dtypes import dtype as as_dtype
from mithril.graph.errors import InputError, OptionError
from mithril.models import Layer, Linear


class Samples:
    def __len__(self):
        return 96

    def __getitem__(self, k):
        return X[k], Y[k]


def samples():
    yield from zip(X, Y, strict=True)


def noisy(row, rng):
    x, y = row
    return x + rng.normal(size=x.shape).astype(np.float32), y


def halved(batch):
    x, y = batch
    return x / 2, y


FORMS = {"arrays": lambda: (X, Y), "indexed": Samples, "generator": lambda: samples, "list": lambda: list(samples())}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 1, "worker": "process"}])
def test_transforms_of_rows_and_batches(form, workers):
    if workers.get("worker") and form == "generator":
        pytest.skip("iterables are read in this process")
    loader = ml.DataLoader(FORMS[form](), 16, transform=noisy, batch_transform=halved, seed=3, **workers)
    first, second = [list(loader) for _ in range(2)]
    loader.close()
    reference = ml.DataLoader((X, Y), 16, transform=noisy, batch_transform=halved, seed=3)
    for a, b in zip(first, reference, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
        np.testing.assert_array_equal(a[1], b[1])
    assert not np.array_equal(first[0][0], second[0][0]), "each epoch has its own numbers"
    noise = np.concatenate([x for x, _ in first]) * 2 - X
    assert 0.9 < noise.std() < 1.1
    assert len({row.tobytes() for row in noise}) == 96


def test_random_transforms_depend_on_the_row_not_on_its_batch():
    a = np.concatenate([x for x, _ in ml.DataLoader((X, Y), 16, transform=noisy)])
    b = np.concatenate([x for x, _ in ml.DataLoader((X, Y), 7, transform=noisy, num_workers=2)])
    np.testing.assert_array_equal(a, b)


def test_random_transforms_resume_to_the_bit(tmp_path):
    def fit(epochs, **options):
        subject = trainer()
        subject.fit(ml.DataLoader((X, Y), 16, shuffle=True, transform=noisy), epochs, **options)
        return subject

    class Stop(ml.Callback):
        def step_end(self, trainer, report):
            if trainer.steps == 9:
                trainer.save(tmp_path / "step-9.safetensors")

    reference = fit(3, callbacks=[Stop()])
    resumed = fit(3, resume=tmp_path / "step-9.safetensors")
    assert resumed.history.steps == reference.history.steps
    for n, x in arrays(reference).items():
        np.testing.assert_array_equal(arrays(resumed)[n], x)


def test_tables():
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"input": list(X), "target": Y})
    table = pyarrow.table({"input": list(X), "target": Y})
    fixed = pyarrow.table({"input": pyarrow.FixedSizeListArray.from_arrays(X.ravel(), 8), "target": Y})
    for data in (frame, table, fixed):
        batch = next(iter(ml.DataLoader(data, 8)))
        np.testing.assert_array_equal(batch["input"], X[:8])
        np.testing.assert_array_equal(batch["target"], Y[:8])
    subject, reference = trainer(), trainer()
    features = pandas.DataFrame(X.astype(np.float64))
    subject.fit(features, frame["target"], 2, validation=(features, frame["target"]))
    reference.fit(X, Y, 2, validation=(X, Y))
    assert subject.history.rows == reference.history.rows
    np.testing.assert_array_equal(subject.predict(features), reference.predict(X))


class Rows(Samples):
    """A table by its interface, as data sets of Hugging Face have it."""

    column_names = ("input", "target")
    shape = (96, 2)

    def __getitem__(self, k):
        return {"input": X[k].tolist(), "target": int(Y[k])}


def test_tables_without_a_loader():
    reference = trainer(metrics="accuracy")
    reference.fit(X, Y, epochs=2, validation_data=(X, Y))
    tables = [Rows()]
    if importlib.util.find_spec("pyarrow"):
        tables.append(importlib.import_module("pyarrow").table({"input": list(X), "target": Y}))
    if importlib.util.find_spec("datasets"):
        tables.append(importlib.import_module("datasets").Dataset.from_dict({"input": X.tolist(), "target": Y}))
    for table in tables:
        subject = trainer(metrics="accuracy")
        subject.fit(table, epochs=2, validation_data=table)
        assert subject.history.rows[-1]["loss"] == reference.history.rows[-1]["loss"]
        np.testing.assert_allclose(subject.predict(table), reference.predict(X), rtol=1e-5)
        assert subject.evaluate(table)["accuracy"] == reference.evaluate((X, Y))["accuracy"]
        with pytest.raises(OptionError, match=r"(?s)y belongs to arrays.*columns: input, target.*name its columns"):
            subject.fit(table, Y)


def test_hugging_face_rows():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict(
        {"tokens": [[1, 2, 3], [4], [5, 6]] * 4, "label": [0, 1, 0] * 4, "text": ["a"] * 12}
    )
    loader = ml.DataLoader(
        rows, 3, transform=lambda row: {n: row[n] for n in ("tokens", "label")}, collate=ml.Padding(columns=["tokens"])
    )
    batch = next(iter(loader))
    np.testing.assert_array_equal(batch["tokens"], [[1, 2, 3], [4, 0, 0], [5, 6, 0]])
    np.testing.assert_array_equal(batch["mask"], [[1, 1, 1], [1, 0, 0], [1, 1, 0]])
    np.testing.assert_array_equal(batch["label"], [0, 1, 0])


# -- sequences ---------------------------------------------------------------------------------------------------------
LENGTHS = np.random.default_rng(0).integers(1, 20, 64)
ROWS = [{"input": np.full((n, 4), n, np.float32), "target": np.zeros(n, np.int32)} for n in LENGTHS]


def test_padding_has_few_sizes_and_masks():
    loader = ml.DataLoader(ROWS, 8, collate=ml.Padding([8, 16, 24], value=-1))
    sizes = set()
    for k, batch in enumerate(loader):
        lengths = LENGTHS[8 * k : 8 * k + 8]
        np.testing.assert_array_equal(batch["mask"].sum(1), lengths)
        assert batch["input"].shape[:2] == batch["target"].shape == batch["mask"].shape
        np.testing.assert_array_equal((batch["input"][..., 0] == -1), batch["mask"] == 0)
        sizes.add(batch["input"].shape[1])
    assert sizes <= {8, 16, 24}
    cut = ml.Padding([8], truncate=True)(ROWS)
    assert cut["input"].shape == (64, 8, 4)
    np.testing.assert_array_equal(cut["mask"].sum(1), np.minimum(LENGTHS, 8))
    tokens, labels, mask = ml.Padding()([(np.arange(3), 1), (np.arange(5), 0)])
    assert (tokens.shape, labels.tolist(), mask.sum()) == ((2, 5), [1, 0], 8)


def test_buckets_hold_similar_lengths_in_a_reproducible_order():
    def make(**options):
        return ml.DataLoader(
            ROWS,
            8,
            shuffle=True,
            seed=1,
            collate=ml.Padding([5, 10, 20]),
            buckets=ml.Buckets(LENGTHS, [5, 10, 20]),
            **options,
        )

    loader = make()
    batches = list(loader)
    assert len(batches) == len(make())
    seen = np.concatenate([b["mask"].sum(1) for b in batches])
    np.testing.assert_array_equal(np.sort(seen), np.sort(LENGTHS))
    for batch in batches:
        low = {5: 0, 10: 5, 20: 10}[batch["input"].shape[1]]
        assert (batch["mask"].sum(1) > low).all()
    sizes = [b["input"].shape[1] for b in batches]
    assert sizes != sorted(sizes), "batches are shuffled"
    second = make()
    iterator = iter(second)
    for _ in range(3):
        next(iterator)
    third = make()
    third.load_state_dict(second.state_dict())
    for a, b in zip(third, batches[3:], strict=True):
        np.testing.assert_array_equal(a["input"], b["input"])
    assert not np.array_equal(next(iter(loader))["mask"], batches[0]["mask"]), "the next epoch has another order"


def test_masks_as_weights_exclude_the_padding():
    class Last(Layer):
        def __init__(self):
            self.body = Linear(4, 3)

        def build(self, x):
            return self.body(x)

    def loss_of(rows, **options):
        subject = trainer(Last())
        return subject.evaluate(ml.DataLoader(rows, len(rows), collate=ml.Padding(mask="sample_weight", **options)))[
            "loss"
        ]

    assert loss_of(ROWS) == pytest.approx(loss_of(ROWS, sizes=[64]), rel=1e-5)


# -- tar files ---------------------------------------------------------------------------------------------------------
def write(path, rows):
    with tarfile.open(path, "w") as archive:
        for k, row in enumerate(rows):
            for name, data in row.items():
                info = tarfile.TarInfo(f"data/{k:04d}.{name}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def npy(x):
    file = io.BytesIO()
    np.save(file, x)
    return file.getvalue()


@pytest.fixture
def shards(tmp_path):
    for k in range(4):
        part = slice(24 * k, 24 * k + 24)
        write(
            tmp_path / f"part-{k:02d}.tar",
            [{"input.npy": npy(x), "target.cls": str(y).encode()} for x, y in zip(X[part], Y[part], strict=True)],
        )
    return str(tmp_path / "part-{00..03}.tar")


def test_tar_streams_train_as_arrays_do(shards):
    subject, reference = trainer(), trainer()
    subject.fit(ml.DataLoader(ml.TarStream(shards), 16), 2)
    reference.fit(ml.DataLoader((X, Y), 16), 2)
    assert subject.history.steps == reference.history.steps


def test_tar_streams_are_shuffled_by_seed_and_epoch_and_resume(shards, tmp_path):
    def fit(epochs, **options):
        subject = trainer()
        subject.fit(ml.DataLoader(ml.TarStream(shards, shuffle=20, seed=2), 16), epochs, **options)
        return subject

    stream = ml.TarStream(shards, shuffle=20)
    first = [row["target"] for row in stream]
    assert sorted(first) == sorted(Y)
    assert first == [row["target"] for row in stream]
    assert first != list(Y)
    stream.set_epoch(1)
    assert first != [row["target"] for row in stream]
    reference = fit(3, callbacks=[ml.Checkpoint(tmp_path / "run", every=4, keep=9)])
    resumed = fit(3, resume=tmp_path / "run" / "step-00000008.safetensors")
    assert resumed.history.steps == reference.history.steps


def test_decoders(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 255, (5, 4, 3)).astype(np.uint8)
    file = io.BytesIO()
    image.fromarray(pixels).save(file, "png")
    row = {
        "png": file.getvalue(),
        "meta.json": json.dumps({"a": 1}).encode(),
        "txt": b"hi",
        "raw": b"\x01",
        "x.own": b"7",
    }
    write(tmp_path / "a.tar", [row])
    (sample,) = ml.TarStream(tmp_path / "a.tar", decode={"own": int})
    np.testing.assert_allclose(sample.pop("png"), pixels.transpose(2, 0, 1) / 255, atol=1e-6)
    assert sample == {"meta": {"a": 1}, "txt": "hi", "raw": b"\x01", "x": 7}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: ml.DataLoader((X, Y), transform=3), "transform: expected a function or None"),
        (
            lambda t: next(iter(ml.DataLoader(X, transform=lambda row: None))),
            "transform returned None(?s:.)*return the row",
        ),
        (lambda t: ml.DataLoader((X, Y), transfrom=noisy), "did you mean 'transform'"),
        (lambda t: ml.DataLoader((X, Y), buckets=ml.Buckets([1, 2], [3])), "Buckets has 2 lengths(?s:.)*96 samples"),
        (lambda t: ml.DataLoader(samples, buckets=ml.Buckets([1], [3])), "the data set is an iterable"),
        (lambda t: ml.Buckets([1, 9], [3, 4]), "a sample has length 9(?s:.)*add a size of at least 9"),
        (lambda t: ml.Buckets("ab", [3]), "Buckets"),
        (lambda t: ml.Buckets([1.5], [3]), r"lengths: at \[0\]: expected int"),
        (lambda t: ml.Padding([4])(ROWS), "the largest size is 4(?s:.)*truncate=True"),
        (lambda t: ml.Padding(columns=["inptu"])(ROWS), "no column 'inptu'(?s:.)*did you mean 'input'"),
        (lambda t: ml.Padding()([1, 2]), "no column holds sequences"),
        (lambda t: list(ml.TarStream(t / "no.tar")), "there is no file"),
        (lambda t: list(ml.TarStream(t / "bad.tar")), "is not a complete tar file"),
        (lambda t: list(ml.TarStream(t / "text.tar")), "'data/0000.cls' of (?s:.)*cannot be decoded as cls"),
        (lambda t: ml.TarStream(t / "no.tar", shuffle=-1), "shuffle: expected int of at least 0"),
    ],
)
def test_wrong_data_is_explained(call, message, tmp_path):
    (tmp_path / "bad.tar").write_bytes(b"no tar file")
    write(tmp_path / "text.tar", [{"cls": b"three"}])
    with pytest.raises((InputError, OptionError), match=message):
        call(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_floats_of_every_width_are_rounded_to_those_of_the_model(dtype):
    columns = X.astype(as_dtype(dtype).numpy)
    subject, expected = trainer(), trainer()
    subject.fit(columns, Y, 1)
    expected.fit(columns.astype(np.float32), Y, 1)
    for name, x in arrays(expected).items():
        np.testing.assert_array_equal(arrays(subject)[name], x, err_msg=name)
