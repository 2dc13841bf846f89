"""Weights as views of files."""

import io
import struct
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save_file

import mithril as ml
from mithril import InputError
from mithril_testing.damaged_files import attempts, check, flipped, truncated

RNG = np.random.default_rng(0)
ARRAYS = {
    "w": RNG.standard_normal((6, 4)).astype(np.float32),
    "turned": np.asfortranarray(RNG.standard_normal((5, 3))),
    "empty": np.zeros((0, 3), np.int8),
    "scalar": np.float32(3.0).reshape(()),
}


@pytest.mark.parametrize("name", ["a.npz", "compressed.npz", "a.safetensors"])
def test_arrays_are_read_only_views(name, tmp_path):
    path = tmp_path / name
    expected = dict(ARRAYS)
    if name == "a.safetensors":
        expected = {n: np.array(x, order="C") for n, x in ARRAYS.items()}
        save_file(expected, path)
    else:
        (np.savez if name == "a.npz" else np.savez_compressed)(path, **expected)
    arrays = ml.open_weights(path)
    assert arrays.keys() == expected.keys()
    for key, array in arrays.items():
        np.testing.assert_array_equal(array, expected[key])
        assert not array.flags.writeable and array.dtype == expected[key].dtype


def test_other_files_are_rejected(tmp_path):
    with pytest.raises(InputError, match=r"cannot read 'a\.bin'"):
        ml.open_weights("a.bin")
    (tmp_path / "a.npz").write_bytes(b"PK nothing")
    with pytest.raises(InputError, match="cannot be read"):
        ml.open_weights(tmp_path / "a.npz")
    header = b"{'descr':".ljust(117) + b"\n"  # ends within a dictionary
    with zipfile.ZipFile(tmp_path / "header.npz", "w") as archive:
        archive.writestr("w.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
    with pytest.raises(InputError, match="cannot be read"):
        ml.open_weights(tmp_path / "header.npz")
    (tmp_path / "empty.safetensors").touch()
    with pytest.raises(InputError) as caught:
        ml.open_weights(tmp_path / "empty.safetensors")
    assert str(caught.value).count("is damaged") == 1
    np.savez(tmp_path / "objects.npz", a=np.array([{}], dtype=object))
    with pytest.raises(InputError, match="Python objects"):
        ml.open_weights(tmp_path / "objects.npz")


def test_types_of_files_that_are_not_decoded_are_named(tmp_path):
    """Name the type of a tensor, the known ones, and a remedy."""
    path = tmp_path / "a.gguf"
    for code, name, remedy in ((16, "iq2_xxs", "quantize the file"), (34, "tq1_0", f"ml.load('{path}') reads it")):
        header = struct.pack("<4sIQQQ1sIQQIQ", b"GGUF", 3, 1, 0, 1, b"w", 2, 256, 2, code, 0)
        path.write_bytes(header + bytes(-len(header) % 32 + 256))
        with pytest.raises(InputError, match=f"tensor 'w' of .* is of the type {name}") as caught:
            ml.open_weights(path)
        assert "iq4_nl, iq4_xs, mxfp4, q2_k" in str(caught.value)
        assert remedy in str(caught.value)


def test_changed_files_give_errors_of_mithril(tmp_path):
    sources = {"npz": tmp_path / "source.npz", "safetensors": tmp_path / "source.safetensors"}
    np.savez(sources["npz"], **ARRAYS)
    save_file({n: np.array(x, order="C") for n, x in ARRAYS.items()}, sources["safetensors"])
    for ending, source in sources.items():
        path = tmp_path / f"changed.{ending}"

        def read(content, path=path):
            path.unlink(missing_ok=True)  # earlier attempts map the old file
            path.write_bytes(content)
            ml.open_weights(path)

        changes = {"truncated": truncated, "flipped": flipped}
        check(list(attempts([source.read_bytes()], changes, read, seed=0, count=300)), refused=150)


def gguf(path, pairs):
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pairs
    path.write_bytes(content + bytes(-len(content) % 32))
    return path


def gguf_array(kind, count, content):
    return struct.pack("<Q1sIIQ", 1, b"x", 9, kind, count) + content


@pytest.mark.parametrize(
    ("kind", "item", "beyond"),
    [(0, b"\0", 1 << 20), (6, b"\0" * 4, 1 << 19), (8, b"\0" * 8, 1 << 19)],
    ids=["bytes", "floats", "texts"],
)
def test_lists_in_metadata_cost_no_more_than_they_may(tmp_path, kind, item, beyond):
    path = gguf(tmp_path / "m.gguf", gguf_array(kind, beyond, item * beyond))
    with ml.reader_limits(room=32 << 20):
        assert ml.open_weights(path) == {}
    with ml.reader_limits(room=1 << 20), pytest.raises(ml.InputError, match="bytes of memory"):
        ml.open_weights(path)
    with ml.reader_limits(room=1 << 20), pytest.raises(ml.InputError, match="bytes of memory"):
        ml.Tokenizer(path)


def test_a_compressed_member_is_compared_with_its_header_before_it_is_read(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, w=np.zeros(1 << 25, np.float32))
    with pytest.raises(ml.InputError, match="needs 134,217,856 bytes of memory"):
        ml.open_weights(path)
    with ml.reader_limits(room=200 << 20):
        assert ml.open_weights(path)["w"].shape == (1 << 25,)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (4,)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w.npy", header.getvalue() + bytes(1 << 20))
    with pytest.raises(ml.InputError, match="its header requires"):
        ml.open_weights(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("w.npy", header.getvalue() + bytes(16))
    with pytest.raises(ml.InputError, match="another method than deflate"):
        ml.open_weights(path)
