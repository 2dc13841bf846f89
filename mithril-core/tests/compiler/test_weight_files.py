"""Weight files: arrays and files that are unsuitable raise our errors, and tensors are matched by name and shape."""

import json

import numpy as np
import pytest
import safetensors.numpy
from safetensors import SafetensorError

from mithril.compiler.weight_files import LoadReport, load_file, match, save_file, saved_states
from mithril.graph import Dim, InputError, MithrilError, TensorType, float16, float32

ONES = np.ones((2, 3), np.float32)


def test_arrays_names_and_states_return(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"w": ONES.T, "n": np.int32(3)}, path, {"states": '["n"]'})
    arrays = load_file(path)
    np.testing.assert_array_equal(arrays["w"], ONES.T)
    assert arrays["n"] == 3 and saved_states(path) == {"n"}
    save_file({"w": ONES}, path, {})
    assert saved_states(path) is None


@pytest.mark.parametrize("tensors", [{"w": np.array(["text"])}, {"w": np.array([None])}, {"\ud800": ONES}])
def test_unsuitable_arrays_and_names_are_refused(tensors, tmp_path):
    with pytest.raises(InputError, match="cannot be saved: expected arrays of numbers by names that files can hold"):
        save_file(tensors, tmp_path / "a.safetensors", {})
    assert not list(tmp_path.iterdir())


def test_errors_of_safetensors_are_converted(tmp_path, monkeypatch):
    def fail(*arguments):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    with pytest.raises(MithrilError, match="No space left on device"):
        save_file({"w": ONES}, tmp_path / "a.safetensors", {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("states", ["n", ["n", 1], None, {"n": 1}])
def test_names_of_states_are_checked(states, tmp_path):
    save_file({"w": ONES}, tmp_path / "a.safetensors", {"states": json.dumps(states)})
    with pytest.raises(InputError, match="the entry 'states' of '.*' is not a list of names"):
        saved_states(tmp_path / "a.safetensors")


def test_unreadable_files(tmp_path):
    with pytest.raises(InputError, match="there is no file"):
        load_file(tmp_path / "absent.safetensors")
    (tmp_path / "text").write_text("text")
    for name in ("text", "."):
        with pytest.raises(InputError, match="is not a readable safetensors file"):
            load_file(tmp_path / name)


def test_tensors_are_matched_by_name_and_shape():
    batch = Dim("B", 1)
    declared = {
        name: TensorType(kind, shape)
        for name, kind, shape in (
            ("first.weight", float16, (2, 3)), ("state", float32, (batch, 3)), ("other", float32, (3, 2)),
            ("deep", float32, (2, 3, 1)), ("absent", float32, (1,)), ("last.weight", float32, (4,)),
        )
    }  # fmt: skip
    actual = dict.fromkeys(("first.weight", "state", "other", "deep", "last.weights", "norm.num_batches_tracked"), ONES)
    tensors, report = match(declared, actual)
    assert {name: (a.dtype.name, a.shape) for name, a in tensors.items()} == {
        "first.weight": ("float16", (2, 3)),
        "state": ("float32", (2, 3)),
    }
    assert report == LoadReport(
        loaded=["first.weight", "state"],
        missing=["absent", "last.weight (is it 'last.weights'?)"],
        unexpected=["last.weights"],
        ignored=["norm.num_batches_tracked"],
        mismatched=["other: expected [3, 2], got [2, 3]", "deep: expected [2, 3, 1], got [2, 3]"],
    )
    assert not report.complete and LoadReport(["w"], ignored=["n"]).complete


@pytest.mark.parametrize("count", [10, 11])
def test_a_report_names_ten_entries(count):
    names = [f"w{k}" for k in range(count)]
    shown = "; ".join(names[:10]) + ("; ... (11)" if count > 10 else "")
    assert str(LoadReport(["a"], missing=names)) == f"loaded 1 tensors\nmissing: {shown}"
