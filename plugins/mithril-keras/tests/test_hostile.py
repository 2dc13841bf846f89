"""Malformed archives: each raises an error of mithril, and none allocates the sizes that the file claims."""

import zipfile

import h5py
import numpy as np
import pytest
from archives import NAMES, RECORDS, changed, members, with_weights, write
from damaged_archives import CHANGES

import mithril as ml
from mithril_testing.damaged_files import attempts, check


def test_changed_archives_give_errors_of_mithril(tmp_path):
    def read(content):
        path = tmp_path / "changed.keras"
        path.unlink(missing_ok=True)  # earlier imports map the old file
        path.write_bytes(content)
        ml.from_keras(path)

    sources = [(RECORDS / f"{n}.keras").read_bytes() for n in NAMES]
    check(list(attempts(sources, CHANGES, read, seed=0, count=150)), refused=50)


def replaced(create):
    def edit(file):
        del file["layers/dense/vars/0"]
        create(file["layers/dense/vars"])

    return edit


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda g: g.create_dataset("0", (10**6, 10**6), np.float32), "larger than the file"),
        (lambda g: g.create_dataset("0", (6, 8), np.float32, chunks=(2, 2)), "only contiguous"),
        (lambda g: g.create_dataset("0", (6, 8), np.float32, external=[("/etc/passwd", 0, 192)]), "only contiguous"),
        (lambda g: g.create_dataset("0", (6, 8), "S4"), "are not numbers"),
        (lambda g: g.__setitem__("0", h5py.ExternalLink("/etc/passwd", "/x")), "is a link"),
        (lambda g: g.__setitem__("0", h5py.SoftLink("/layers/dense_1/vars/0")), "is a link"),
    ],
)
def test_datasets_in_other_layouts(tmp_path, create, message):
    with pytest.raises(ml.InputError, match=message):
        ml.from_keras(with_weights("dense", tmp_path / "m.keras", replaced(create)))


def test_a_member_that_claims_a_huge_size(tmp_path):
    path = tmp_path / "m.keras"
    content = members(RECORDS / "dense.keras")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in content.items():
            z.writestr(name, data)
    data = bytearray(path.read_bytes())
    place = data.rindex(b"PK\x01\x02")  # the directory entry of the last member
    data[place + 24 : place + 28] = (0xFFFFFFF0).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ml.InputError, match="needs 4,294,[0-9]{3},[0-9]{3} bytes of memory"):
        ml.from_keras(path)


def test_a_cycle_of_layers(tmp_path):
    def edit(config):
        layers = config["config"]["layers"]
        first = next(x for x in layers if x["class_name"] == "Conv2D")
        last = layers[-1]["config"]["name"]
        first["inbound_nodes"][0]["args"][0]["config"]["keras_history"] = [last, 0, 0]

    with pytest.raises(ml.InputError, match="cycle"):
        ml.from_keras(changed("images", tmp_path / "m.keras", edit))


@pytest.mark.parametrize("content", [b"", b"PK", b"\x89HDF\r\n\x1a\n" + bytes(600)])
def test_other_files(tmp_path, content):
    path = tmp_path / "m.keras"
    path.write_bytes(content)
    with pytest.raises(ml.InputError, match="is not a valid Keras archive"):
        ml.from_keras(path)


def test_an_archive_without_weights(tmp_path):
    content = members(RECORDS / "dense.keras")
    del content["model.weights.h5"]
    with pytest.raises(ml.InputError, match=r"it has no model.weights.h5"):
        ml.from_keras(write(tmp_path / "m.keras", content))


def test_weights_that_are_deflated(tmp_path):
    path = tmp_path / "m.keras"
    weights = with_weights("dense", path, lambda f: f.create_dataset("pad", data=np.zeros(80 << 20, np.uint8)))
    content = members(weights)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in content.items():
            z.writestr(name, data)
    with pytest.raises(ml.InputError, match="bytes of memory"):
        ml.from_keras(path)
    with ml.reader_limits(room=100 << 20):
        ml.from_keras(path)


def test_a_configuration_that_nests(tmp_path):
    content = members(RECORDS / "dense.keras") | {"config.json": b"[" * 100_000}
    with pytest.raises(ml.InputError, match=r"config\.json of .* is not readable JSON"):
        ml.from_keras(write(tmp_path / "m.keras", content))
