"""The Open Inference Protocol, version 2, with tensors in JSON or binary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mithril.graph import ShapeError, __version__
from mithril_serve.batcher import Arrays, Batcher
from mithril_serve.limits import Limits, RequestError, parsed, read_body

TYPES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
}
NAMES = {dtype: name for name, dtype in TYPES.items()}
HEADER = "inference-header-content-length"


class Inference:
    """The routes of a model that is not a language model."""

    def __init__(self, batcher: Batcher, name: str, limits: Limits) -> None:
        self.batcher, self.name, self.limits = batcher, name, limits
        self.specs = batcher.model.specs

    def routes(self) -> list[Route]:
        return [
            Route("/v2", self.server),
            Route("/v2/models/{name}", self.model),
            Route("/v2/models/{name}/ready", self.ready),
            Route("/v2/models/{name}/infer", self.infer, methods=["POST"]),
        ]

    async def server(self, request: Request) -> Response:
        return JSONResponse({"name": "mithril-serve", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def model(self, request: Request) -> Response:
        self._check_name(request)
        inputs = [
            {"name": n, "datatype": _type_name(spec.dtype), "shape": _sizes(spec.shape)}
            for n, spec in self.specs.items()
        ]
        try:
            results = self.batcher.model.interface.results_of("output")
        except ShapeError:  # the sizes of the first request decide
            results = ()
        outputs = [
            {"name": r.name, "datatype": _type_name(r.value.dtype), "shape": _sizes(r.value.shape)} for r in results
        ]
        return JSONResponse(
            {"name": self.name, "versions": [], "platform": "mithril", "inputs": inputs, "outputs": outputs}
        )

    async def ready(self, request: Request) -> Response:
        self._check_name(request)
        return JSONResponse({"name": self.name, "ready": True})

    async def infer(self, request: Request) -> Response:
        self._check_name(request)
        body = await read_body(request, self.limits.body_bytes)
        length = request.headers.get(HEADER, str(len(body)))
        if not length.isdigit() or int(length) > len(body):
            raise RequestError(400, f"{HEADER} is {length[:20]!r}, and the body has {len(body)} bytes")
        content, rest = await parsed(body[: int(length)]), memoryview(body)[int(length) :]
        inputs: Arrays = {}
        for tensor in _tensors(content, "inputs", required=True):
            array, rest = _array(tensor, rest)
            if tensor["name"] in inputs:
                raise RequestError(400, f"the input {tensor['name'][:80]!r} occurs twice", "inputs")
            inputs[tensor["name"]] = self._checked(tensor["name"], array)
        if len(rest):
            raise RequestError(400, f"{len(rest)} bytes of the body belong to no input")
        if missing := [n for n, spec in self.specs.items() if spec.required and n not in inputs]:
            raise RequestError(400, f"missing inputs: {', '.join(missing)}", "inputs")
        outputs = await self.batcher.run(inputs)
        return _response(content, outputs, self.name)

    def _check_name(self, request: Request) -> None:
        name = request.path_params["name"]
        if name != self.name:
            raise RequestError(404, f"the model {name[:80]!r} does not exist; this server has {self.name!r}")

    def _checked(self, name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if name not in self.specs:
            raise RequestError(400, f"the model has no input {name[:80]!r}; it has {', '.join(self.specs)}", "inputs")
        dtype = self.specs[name].dtype
        if dtype is not None and array.dtype.name != dtype.name:
            expected = NAMES.get(dtype.name, dtype.name)
            raise RequestError(400, f"the input {name!r} is {NAMES[array.dtype.name]}, expected {expected}", "inputs")
        return array


def _tensors(content: Mapping[str, Any], field: str, *, required: bool = False) -> list[dict[str, Any]]:
    tensors = content.get(field)
    if tensors is None and not required:
        return []
    if not isinstance(tensors, list) or not all(
        isinstance(t, dict) and isinstance(t.get("name"), str) for t in tensors
    ):
        raise RequestError(400, f"{field} is a list of objects with a name", field)
    return tensors


def _array(tensor: Mapping[str, Any], rest: memoryview) -> tuple[np.ndarray[Any, Any], memoryview]:
    """Return the array of an input, and the bytes after it."""
    name, shape, kind = tensor["name"][:80], tensor.get("shape"), tensor.get("datatype")
    if not isinstance(kind, str) or kind not in TYPES:
        raise RequestError(400, f"the datatype of {name!r} is {str(kind)[:20]}, expected one of {', '.join(TYPES)}")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape) or len(shape) > 32:
        raise RequestError(400, f"the shape of {name!r} is a list of sizes, got {str(shape)[:80]}", "inputs")
    dtype, count = np.dtype(TYPES[kind]), math.prod(shape)
    parameters = tensor.get("parameters")
    size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if size is not None:
        if type(size) is not int or size != count * dtype.itemsize or size > len(rest):
            raise RequestError(
                400, f"{name!r} has {str(size)[:20]} bytes, its shape {count * dtype.itemsize}", "inputs"
            )
        return np.frombuffer(rest[:size], dtype).reshape(shape), rest[size:]
    try:
        data = np.asarray(tensor.get("data"))
        is_kind = data.dtype.kind in {"b": "b", "u": "iu", "i": "iu"}.get(dtype.kind, "fiu") or not data.size
        if not is_kind or data.size != count:
            raise ValueError
        array = np.asarray(tensor.get("data"), dtype)  # raises for integers beyond the type
        return array.reshape(shape), rest
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise RequestError(400, f"the data of {name!r} are not {count} elements of {kind}", "inputs") from None


def _response(content: Mapping[str, Any], outputs: Arrays, model: str) -> Response:
    requested = _tensors(content, "outputs")
    unknown = [t["name"][:80] for t in requested if t["name"] not in outputs]
    if unknown:
        raise RequestError(400, f"the model has no output {unknown[0]!r}; it has {', '.join(outputs)}", "outputs")
    is_binary = (content.get("parameters") or {}).get("binary_data_output") is True
    tensors, blobs = [], []
    for tensor in requested or [{"name": name} for name in outputs]:
        x = np.asarray(outputs[tensor["name"]], order="C")
        if x.dtype.name not in NAMES:
            x = x.astype(np.float32)  # bfloat16 has no type in the protocol
        described: dict[str, Any] = {"name": tensor["name"], "datatype": NAMES[x.dtype.name], "shape": list(x.shape)}
        if (tensor.get("parameters") or {}).get("binary_data", is_binary) is True:
            described["parameters"] = {"binary_data_size": x.nbytes}
            blobs.append(x.tobytes())
        else:
            described["data"] = [v if math.isfinite(v) else None for v in x.ravel().tolist()]
        tensors.append(described)
    head: dict[str, Any] = {"model_name": model, "outputs": tensors}
    if isinstance(content.get("id"), str):
        head["id"] = content["id"]
    response = JSONResponse(head)
    if not blobs:
        return response
    headers = {HEADER: str(len(response.body))}
    return Response(b"".join([response.body, *blobs]), headers=headers, media_type="application/octet-stream")


def _type_name(dtype: Any) -> str:
    return NAMES.get(dtype.name, "FP32") if dtype is not None else "FP32"


def _sizes(shape: Any) -> list[int]:
    return [-1] if shape is None else [n if isinstance(n, int) else -1 for n in shape]
