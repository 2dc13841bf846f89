"""Weights as views of files, and the memory that programs of their codes take."""

import subprocess
import sys

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
PROGRAM = """
import sys
import numpy as np
import mithril as ml
from mithril.models import Linear

def anonymous():
    return next(1024 * int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon"))

def compiled(size):
    model = ml.Model()
    for k in range(4):
        model += Linear(size, size, bias=False, name=f"l{k}")
    setting = {"weights": "int4", "activations": "dynamic"}
    return ml.compile(model, "c", shapes={"input": [1, size]}, static_inference=True, quantization=setting)

small = compiled(64)  # imports the compiler
small.bind({f"l{k}.weight": np.ones((64, 64), np.float32) for k in range(4)})
small({"input": np.ones((1, 64), np.float32)})
before = anonymous()
model = compiled(2048)
model.bind(ml.open_weights(sys.argv[1]))
model({"input": np.ones((1, 2048), np.float32)})
print((anonymous() - before) / (4 * 2048 * 2048))
"""


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
    np.savez(tmp_path / "objects.npz", a=np.array([{}], dtype=object))
    with pytest.raises(InputError, match="Python objects"):
        ml.open_weights(tmp_path / "objects.npz")


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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_codes_are_the_only_weights_in_memory(tmp_path):
    """Count bytes per weight: float32 has 4, codes and panels of 4 bits have 0.56 each."""
    pytest.importorskip("mithril_cbackend")
    weights = {f"l{k}.weight": RNG.standard_normal((2048, 2048)).astype(np.float32) for k in range(4)}
    save_file(weights, tmp_path / "w.safetensors")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "w.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2.0
