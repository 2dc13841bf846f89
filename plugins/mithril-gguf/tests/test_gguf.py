"""Files as the package ``gguf`` of llama.cpp reads them: metadata, tensors, and all formats of blocks."""

import re
from pathlib import Path

import gguf
import numpy as np
import pytest

from mithril.graph import InputError, dtype
from mithril_gguf.formats import FORMATS, OTHERS
from mithril_gguf.matrix import BlockMatrix, array_of
from mithril_gguf.reader import PLAIN, read_gguf, read_metadata
from mithril_gguf.writer import stored_tensor, write_gguf

rng = np.random.default_rng(0)
README = Path(__file__).parents[1] / "README.md"
METADATA = {
    "general.architecture": "example",
    "text": "größer",
    "yes": True,
    "integer": -(1 << 62),
    "float": 0.1,
    "texts": ["a", "", "日本"],
    "numbers": [1, 2, 1 << 40],
    "floats": [0.1, 2.5],
    "flags": [True, False],
    **{f"np.{t}": np.dtype(t).type(3) for t in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8")},
}


def test_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL):
        exec(block, {})


def test_metadata_has_the_types_that_were_written(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, {**METADATA, "empty": [], "nothing": ""}, [])
    assert read_metadata(path) == METADATA
    fields = gguf.GGUFReader(path).fields
    assert {name: fields[name].contents() for name in METADATA} == METADATA
    kinds = {name: fields[name].types[-1].name for name in METADATA}
    assert (kinds["integer"], kinds["float"], kinds["numbers"], kinds["np.u2"]) == (
        *("INT64", "FLOAT64", "INT64", "UINT16"),
    )


def test_tensors_of_all_types_are_aligned_and_equal(tmp_path):
    path = tmp_path / "m.gguf"
    arrays = {t.name: np.arange(15).reshape(3, 5).astype(t) for t in PLAIN.values()}
    arrays["swapped"], arrays["strided"] = arrays["float32"].astype(">f4"), np.arange(24.0).reshape(4, 6)[::2, ::3]
    write_gguf(path, {"general.architecture": "x"}, [stored_tensor(n, x) for n, x in arrays.items()])
    tensors = read_gguf(path).tensors
    for name, array in arrays.items():
        assert np.array_equal(array_of(tensors[name]), array)
    for t in gguf.GGUFReader(path).tensors:
        assert t.data.tobytes() == tensors[t.name].data.tobytes() and t.data_offset % 32 == 0
        assert [*reversed(t.shape)] == list(arrays[t.name].shape)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_blocks_have_the_numbers_of_another_decoder(name, tmp_path):
    """Random bytes are blocks of every format; scales of damaged files may be infinite."""
    form = FORMATS[name]
    kind = gguf.GGMLQuantizationType(form.code)
    assert kind.name.lower() == name and gguf.GGML_QUANT_SIZES[kind] == (form.block, form.bytes)
    data = rng.integers(0, 256, (6, form.row(512)), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data, kind)
    np.testing.assert_allclose(form.decoded(data), expected, rtol=2e-6, atol=0)
    matrix = BlockMatrix(data, form, (6, 512), order=np.array([2, 0, 1, 3, 5, 4]))
    np.testing.assert_array_equal(np.asarray(matrix), form.decoded(data[[2, 0, 1, 3, 5, 4]]))


def test_names_of_types_are_those_of_ggml():
    assert {code: gguf.GGMLQuantizationType(code).name.lower() for code in OTHERS} == OTHERS


def test_a_file_that_ends_early_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, METADATA, [stored_tensor("w", np.ones(3, dtype("bfloat16").numpy))])
    content = path.read_bytes()
    for size in range(0, len(content) - 26, 7):
        path.write_bytes(content[:size])
        with pytest.raises(InputError):
            read_gguf(path)
