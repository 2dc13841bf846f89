"""Folders that an export writes are read back with the same results, in all families."""

import base64
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar

import numpy as np
import pytest
from checkpoints import read_record, write_folder
from safetensors.numpy import load_file, save_file

import mithril as ml
from mithril.graph import InputError, UnsupportedError
from mithril.models import Linear, Sequential

X = {"input_ids": np.array([[5, 6, 7]], np.int32)}
FAMILIES = ("llama2", "gpt2", "gemma2", "phi3", "qwen3_moe", "mixtral", "bert_classes", "t5", "vit_classes", "whisper")


def compiled_of(folder, **options):
    return ml.compile(ml.from_pretrained(folder, **options), "numpy", inference=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_written_folder_has_the_tensors_of_its_source(family, folders, tmp_path):
    source = folders(family)
    written = compiled_of(source).export(tmp_path / "out", format="huggingface").path
    expected, tensors = load_file(source / "model.safetensors"), load_file(written / "model.safetensors")
    assert (
        tensors.keys() <= expected.keys()
        and ml.from_pretrained(written).pretrained.keys() == ml.from_pretrained(source).pretrained.keys()
    )
    for name, array in tensors.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    settings = json.loads((source / "config.json").read_text())
    written_settings = json.loads((written / "config.json").read_text())
    assert written_settings.pop("torch_dtype", None) or written_settings.pop("dtype") == "float32"
    assert written_settings == {k: v for k, v in settings.items() if k not in ("dtype", "torch_dtype")}


def test_changed_parameters_and_their_dtype(tmp_path):
    record = read_record("llama2")
    source = write_folder(tmp_path / "copy", record["config"], record["shapes"])
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    (source / "code.py").write_text("raise SystemExit")
    compiled = compiled_of(source)
    doubled = {n: 2 * compiled.backend.to_numpy(x) for n, x in compiled.params.items()}
    written = compiled.export(tmp_path / "out", format="huggingface", params=doubled, dtype="bfloat16").path
    assert (written / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (written / "1_Pooling" / "config.json").read_text() == "{}" and not (written / "code.py").exists()
    model = ml.from_pretrained(written)
    assert model.pretrained.tensors["lm_head.weight"].dtype.__name__ == "bfloat16"
    np.testing.assert_allclose(model.pretrained["lm_head.weight"], doubled["lm_head.weight"], rtol=0.01)


def test_stacked_experts_are_separate_in_the_files(folders, tmp_path):
    source = folders("mixtral")
    written = compiled_of(source, stack_experts=True).export(tmp_path / "out", format="huggingface").path
    np.testing.assert_array_equal(compiled_of(written)(X)["logits"], compiled_of(source)(X)["logits"])


def test_a_model_with_a_cache_is_written_before_its_first_call(folders, tmp_path):
    compiled = compiled_of(folders("llama2"), cache=8)
    written = compiled.export(tmp_path / "out", format="huggingface").path
    np.testing.assert_array_equal(compiled_of(written)(X)["logits"], compiled_of(folders("llama2"))(X)["logits"])
    model = ml.from_pretrained(folders("llama2"), cache=8).replace("lm_head", Linear(7))
    with pytest.raises(InputError, match="there are no parameters to export"):
        ml.compile(model, "numpy", inference=True).export(tmp_path / "other", format="huggingface")


def test_names_are_those_of_the_source(tmp_path):
    record = read_record("llama2")
    source = write_folder(tmp_path / "copy", record["config"], record["shapes"])
    short = {n.removeprefix("model."): x for n, x in load_file(source / "model.safetensors").items()}
    save_file(short, source / "model.safetensors")
    written = compiled_of(source).export(tmp_path / "out", format="huggingface").path
    assert load_file(written / "model.safetensors").keys() == short.keys()
    compiled_of(written).export(written, format="huggingface")  # over the files that it has mapped
    np.testing.assert_array_equal(compiled_of(written)(X)["logits"], compiled_of(source)(X)["logits"])


def test_a_head_with_its_own_weights_is_said_in_the_configuration(tmp_path):
    record = read_record("gemma")
    source = write_folder(tmp_path / "copy", record["config"], record["shapes"])
    tensors = load_file(source / "model.safetensors")
    head = 2 * tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": head}, source / "model.safetensors")
    written = compiled_of(source).export(tmp_path / "out", format="huggingface").path
    assert json.loads((written / "config.json").read_text())["tie_word_embeddings"] is False
    np.testing.assert_array_equal(load_file(written / "model.safetensors")["lm_head.weight"], head)


def test_models_without_a_checkpoint_and_other_parameters_are_refused(folders, tmp_path):
    compiled = ml.compile(Sequential(Linear(2)), "numpy", shapes={"input": [1, 3]})
    compiled.bind(compiled.randomize_params(0))
    with pytest.raises(UnsupportedError, match="only models of ml.from_pretrained"):
        compiled.export(tmp_path / "out", format="huggingface")
    compiled = compiled_of(folders("llama2"))
    arrays = {n: compiled.backend.to_numpy(x) for n, x in compiled.params.items()}
    less = {n: x for n, x in arrays.items() if n != "lm_head.weight"}
    for wrong, text in [
        (less, "missing: 'lm_head.weight'"),
        ({**arrays, "lm_head.lora_a": np.ones(2)}, "not of the checkpoint: 'lm_head.lora_a'"),
        ({**arrays, "lm_head.weight": np.ones((2, 2))}, "not of the checkpoint: 'lm_head.weight'"),
    ]:
        with pytest.raises(InputError, match=text):
            compiled.export(tmp_path / "out", format="huggingface", params=wrong)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InputError, match="has weights in several files"):
        compiled.export(tmp_path / "out", format="huggingface")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors.index.json"]


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's protocol that an upload of small files takes."""

    files: ClassVar[dict[str, bytes]] = {}

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer right":
            return self.reply(401, {"error": "Invalid username or password."})
        if self.path == "/api/repos/create":
            return self.reply(200, {"url": f"http://{self.headers['Host']}/me/model"})
        if "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            return self.reply(
                200, {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]}
            )
        if "/commit/" not in self.path:  # the check of the card's metadata
            return self.reply(200, {"errors": [], "warnings": []})
        for line in body.splitlines():
            row = json.loads(line)
            if row["key"] == "file":
                self.files[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
        return self.reply(200, {"commitUrl": f"http://{self.headers['Host']}/me/model/commit/1", "commitOid": "1"})

    def reply(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


UPLOAD = """
import sys
import mithril as ml

source = sys.argv[1]
if sys.argv[2] == "compiled":
    source = ml.compile(ml.from_pretrained(source), "numpy", inference=True)
try:
    print(ml.push_to_hub(source, "me/model"))
except ml.MithrilError as error:
    print(type(error).__name__, error)
"""


def test_uploads(folders, tmp_path):
    pytest.importorskip("huggingface_hub")
    folder = tmp_path / "own"
    (folder / ".hidden").mkdir(parents=True)
    (folder / ".hidden" / "secret").write_text("secret")
    (folder / "README.md").write_text("# Own")
    (folder / "model.onnx").write_bytes(b"1234")
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        # huggingface_hub reads its variables when it is imported
        address = f"http://127.0.0.1:{server.server_port}"
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": "right"}

        def upload(source, form="folder", **variables):
            command = [sys.executable, "-c", UPLOAD, str(source), form]
            return subprocess.run(command, env=environment | variables, capture_output=True, text=True).stdout

        assert upload(folder).strip() == f"{address}/me/model"
        assert Hub.files == {"README.md": b"# Own", "model.onnx": b"1234"}
        Hub.files.clear()
        upload(folders("t5"), "compiled")
        assert {"README.md", "config.json", "model.safetensors"} <= Hub.files.keys()
        assert b'ml.from_pretrained("me/model")' in Hub.files["README.md"]
        refused = upload(folder, HF_TOKEN="wrong")
        assert "BackendError 'me/model' was not uploaded" in refused and "hint: hf auth login" in refused
        server.shutdown()


def test_uploads_of_nothing(tmp_path):
    for source, repository, text in [
        (tmp_path, "model", "not the name of a repository"),
        (tmp_path / "none", "me/model", "there is no folder"),
        (tmp_path, "me/model", "has no files"),
    ]:
        with pytest.raises(InputError, match=text):
            ml.push_to_hub(source, repository)
