"""The Open Inference Protocol: JSON and binary tensors, dynamic batches, and wrong requests."""

import asyncio
import json
import threading

import httpx2
import numpy as np
import pytest
from small_servers import classifier, running

import mithril as ml
from mithril.models import Linear, Model, Softmax
from mithril_serve.batcher import Batcher
from mithril_serve.limits import Limits
from mithril_serve.serving import application

X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def url():
    with running(application(classifier(), name="iris", limits=Limits(body_bytes=10_000))) as address:
        yield f"{address}/v2/models/iris"


def tensor(x, **more):
    return {"name": "input", "shape": list(x.shape), "datatype": "FP32", "data": x.tolist(), **more}


def test_tensors_in_json_and_binary(url):
    expected = classifier()({"input": X})["output"]
    answer = httpx2.post(f"{url}/infer", json={"id": "7", "inputs": [tensor(X)]}).json()
    assert (answer["id"], answer["outputs"][0]["shape"]) == ("7", [6, 3])
    np.testing.assert_allclose(np.reshape(answer["outputs"][0]["data"], (6, 3)), expected, rtol=1e-6)
    described = tensor(X, parameters={"binary_data_size": X.nbytes})
    del described["data"]
    head = json.dumps({"inputs": [described], "parameters": {"binary_data_output": True}}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    answer = httpx2.post(f"{url}/infer", content=head + X.tobytes(), headers=headers)
    size = int(answer.headers["inference-header-content-length"])
    assert json.loads(answer.content[:size])["outputs"][0]["parameters"] == {"binary_data_size": 72}
    np.testing.assert_array_equal(np.frombuffer(answer.content[size:], np.float32).reshape(6, 3), expected)


def test_metadata(url):
    answer = httpx2.get(url).json()
    assert answer["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 4]}]
    assert answer["outputs"] == [{"name": "output", "datatype": "FP32", "shape": [-1, 3]}]
    assert httpx2.get(f"{url}/ready").json() == {"name": "iris", "ready": True}
    base = url.removesuffix("/models/iris")
    assert httpx2.get(f"{base}/health/live").status_code == 200
    assert "binary_tensor_data" in httpx2.get(base).json()["extensions"]
    assert httpx2.get(f"{base}/models/other").status_code == 404


WRONG = {
    "no inputs": ({}, "inputs is a list"),
    "missing": ({"inputs": []}, "missing inputs: input"),
    "other name": ({"inputs": [{**tensor(X), "name": "x"}]}, "has no input 'x'"),
    "twice": ({"inputs": [tensor(X), tensor(X)]}, "occurs twice"),
    "dtype": ({"inputs": [tensor(X, datatype="BYTES")]}, "expected one of BOOL"),
    "texts": ({"inputs": [tensor(X[:1], data=["a", "b", "c", "d"])]}, "not 4 elements of FP32"),
    "ragged": ({"inputs": [tensor(X[:1], data=[[1, 2], [3]])]}, "not 4 elements"),
    "shape": ({"inputs": [tensor(X[:1], shape=[2, 4])]}, "not 8 elements"),
    "negative": ({"inputs": [tensor(X, shape=[-6, -4])]}, "is a list of sizes"),
    "huge": ({"inputs": [tensor(X, shape=[1 << 39] * 30)]}, "elements of FP32"),
    "overflow": ({"inputs": [tensor(X[:1], datatype="INT8", data=[1, 2, 3, 400])]}, "elements of INT8"),
    "features": ({"inputs": [tensor(X[:, :3])]}, ""),
    "binary": ({"inputs": [tensor(X, parameters={"binary_data_size": 5})]}, "5 bytes"),
    "output": ({"inputs": [tensor(X)], "outputs": [{"name": "z"}]}, "no output 'z'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_say_what_is_wrong(url, name):
    content, message = WRONG[name]
    answer = httpx2.post(f"{url}/infer", json=content)
    assert answer.status_code == 400
    assert message in answer.json()["error"]


def together(model, inputs, **limits):
    """Return the outputs of requests that arrive at once, and the number of batches."""
    results = {}
    with running(application(model, name="m", limits=Limits(**limits))) as url:

        def request(k, x):
            body = {"inputs": [tensor(x)]}
            results[k] = httpx2.post(f"{url}/v2/models/m/infer", json=body, timeout=30).json()["outputs"][0]["data"]

        threads = [threading.Thread(target=request, args=pair) for pair in enumerate(inputs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        text = httpx2.get(f"{url}/metrics").text
    return results, int(text.split("\nmithril_batches_total ")[1].split()[0])


def test_requests_at_once_are_rows_of_batches():
    results, _ = together(classifier(), [X[k : k + 1 + k % 2] for k in range(5)], rows=4)
    for k, values in results.items():
        expected = classifier()({"input": X[k : k + 1 + k % 2]})["output"]
        np.testing.assert_allclose(np.reshape(values, expected.shape), expected, rtol=1e-5)


def test_waiting_calls_become_one_batch():
    """Requests that wait while the model runs share the next batch, up to the largest number of rows."""
    compiled = classifier()
    begun, go = threading.Event(), threading.Event()

    class Slow:
        specs, backend, model = compiled.specs, compiled.backend, compiled.model
        sizes = []

        def __call__(self, inputs):
            self.sizes.append(len(inputs["input"]))
            begun.set()
            go.wait(10)
            return compiled(inputs)

    async def load():
        batcher = Batcher(Slow(), rows=4, delay=0.0)
        first = asyncio.ensure_future(batcher.run({"input": X[:1]}))
        await asyncio.to_thread(begun.wait, 10)
        following = [asyncio.ensure_future(batcher.run({"input": X[k : k + 1]})) for k in range(1, 6)]
        await asyncio.sleep(0)
        go.set()
        results = await asyncio.gather(first, *following)
        await asyncio.to_thread(batcher.close)
        return results

    results = asyncio.run(load())
    assert Slow.sizes == [1, 4, 1]
    np.testing.assert_allclose(
        np.concatenate([r["output"] for r in results]), compiled({"input": X})["output"], rtol=1e-5
    )


def test_rows_that_depend_on_each_other_are_not_batched():
    model = Model(Linear(4, 3), Softmax(axis=0))
    compiled = ml.compile(model, "numpy", shapes={"input": [None, 4]}, inference=True)
    compiled.bind(compiled.randomize_params(seed=0))
    results, batches = together(compiled, [X[:1]] * 4)
    assert batches == 4
    assert all(np.allclose(values, 1.0) for values in results.values())
