"""Tests of a device of the C backend: first samples of all operations as one program, and programs of every kind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest

import mithril as ml
from mithril import ops
from mithril.backend import Backend, BuildOptions
from mithril.derivatives import gradients
from mithril.graph import Builder, DType, Graph, dtype as as_dtype, evaluate
from mithril_testing.backend import with_cotangents
from mithril_testing.cases import backend_cases, differentiable, gradient_graph
from mithril_testing.compare import assert_close, tolerance
from mithril_testing.grown import join_graphs

# factorizations by LAPACK, and bits of storage formats
ON_HOST = frozenset({"bitcast", "cholesky", "eigh", "qr", "slogdet", "solve", "svd", "triangular_solve"})
Arrays = Mapping[str, Any]


def first_samples(dtypes: frozenset[DType], part: int = 0, parts: int = 1) -> tuple[Graph, Arrays]:
    """Return the first sample of every operation and its gradient as one graph, or of every n-th operation."""
    graphs: dict[str, Graph] = {}
    arguments: dict[str, Any] = {}
    cases = [c for c in backend_cases(dtypes) if c.number == 0 and c.dtype is None]
    for case in cases[part::parts]:
        graphs[case.id] = case.graph()
        if case.sample.gradient and differentiable(case):
            graphs[f"gradient of {case.id}"] = gradient_graph(case.graph())
        for name in (case.id, f"gradient of {case.id}"):
            if name in graphs:
                values = with_cotangents(graphs[name], case.inputs())
                arguments |= {f"{name}/{n}": a for n, a in values.items()}
    return join_graphs(list(graphs.items()), "operations"), arguments


class DeviceConformance:
    """Inherit and set ``device``; ``parts`` runs one part of the operations in place of all."""

    device: ClassVar[str]
    remedy: ClassVar[str]  # part of the error for a device that is not there
    part: ClassVar[int] = 0
    parts: ClassVar[int] = 1

    @pytest.fixture
    def backend(self) -> Backend:
        backend: Backend = ml.CBackend(device=self.device)
        return backend

    @staticmethod
    def run(backend: Any, graph: Graph, arguments: Arrays) -> tuple[Any, dict[str, Any]]:
        """Build a graph and run it once."""
        executable = backend.build(backend.decomposed(graph, BuildOptions()), BuildOptions())
        params = {i.name for i in graph.with_role("param")}
        native = {n: backend.array(a) for n, a in arguments.items()}
        results = executable({n: a for n, a in native.items() if n in params}, native)
        return executable, {n: backend.to_numpy(a) for n, a in results.items()}

    def test_every_operation_and_its_gradient(self, backend: Any) -> None:
        """Compare the first samples; a driver compiles each program on its own, so that they are one."""
        graph, arguments = first_samples(backend.dtypes, self.part, self.parts)
        executable, results = self.run(backend, graph, arguments)
        assert executable.program.fallbacks <= ON_HOST
        assert self.parts > 1 or executable.program.fallbacks == ON_HOST
        with np.errstate(all="ignore"):
            expected = evaluate(graph, arguments)
        for name, reference in expected.items():
            assert_close(results[name], reference, tolerance(as_dtype(reference.dtype), 16.0), name)

    def test_gradients_of_a_network_stay_on_the_device(self, backend: Any) -> None:
        with Builder() as b:
            x, w = b.input("x", (6, 9)), b.param("w", (9, 5))
            y = ops.softmax(ops.layer_norm(x @ w, axes=-1), axis=-1)
        graph = gradients(b.build({"y": y}), None, ["w"])
        rng = np.random.default_rng(0)
        arguments = {i.name: rng.normal(size=i.type.shape).astype(np.float32) for i in graph.arguments}
        executable, results = self.run(backend, graph, arguments)
        for name, expected in evaluate(graph, arguments).items():
            np.testing.assert_allclose(results[name], expected, rtol=2e-4, atol=2e-5)
        assert {type(step).__name__ for step in executable.program.steps} == {"Run"}
        assert not executable.program.calls

    def test_remainders_of_doubles(self, backend: Any) -> None:
        """Compute with the bits of float64, which decide about the signs of zeros."""
        if ml.float64 not in backend.dtypes:
            pytest.skip("the device has no float64")
        with Builder() as b:
            x, y = b.input("x", (6,), "float64"), b.input("y", (6,), "float64")
            outputs = {"quotient": x // y, "remainder": x % y}
        graph = b.build(outputs)
        arguments = {"x": np.array([5.5, -5.5, -0.0, 0.0, 7.0, -7.0]), "y": np.array([2.0, 2.0, 3.0, -3.0, -2.5, -2.5])}
        _, results = self.run(backend, graph, arguments)
        for name, expected in evaluate(graph, arguments).items():
            np.testing.assert_array_equal(results[name], expected)
            np.testing.assert_array_equal(np.signbit(results[name]), np.signbit(expected))

    def test_loops_and_branches_of_the_graph(self, backend: Any) -> None:
        with Builder() as b:
            x, n = b.input("x", (4,)), b.input("n", (), "int32")
            doubled, _ = ops.while_loop(lambda s: s[1] < n, lambda s: (s[0] * 2.0, s[1] + 1), (x, np.int32(0)))
            last, rows = ops.scan(lambda c, row: (c + row, c * row), x * 0.0, ops.stack(doubled, x, x, axis=0))
            y = ops.cond(ops.sum(x) > 0, lambda v: v + 1.0, lambda v: v - 1.0, last)
        graph = b.build({"y": y, "rows": rows})
        for values, count in ((np.arange(4), 3), (-np.arange(4), 0)):
            arguments = {"x": values.astype(np.float32), "n": np.int32(count)}
            _, results = self.run(backend, graph, arguments)
            for name, expected in evaluate(graph, arguments).items():
                np.testing.assert_allclose(results[name], expected, rtol=1e-6)

    def test_a_factorization_runs_on_the_host_and_is_recorded(self, backend: Any) -> None:
        with Builder() as b:
            x = b.input("x", (3, 3))
            y = ops.cholesky(x @ ops.transpose(x, perm=(1, 0)) + np.eye(3, dtype=np.float32)) * 2.0
        options = BuildOptions()
        graph = b.build({"y": y})
        backend.decomposed(graph, options)
        assert "NumPy reference" in str(options.decisions)
        arguments = {"x": np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)}
        executable, results = self.run(backend, graph, arguments)
        assert executable.program.fallbacks == {"cholesky"}
        np.testing.assert_allclose(results["y"], evaluate(graph, arguments)["y"], rtol=1e-5)

    def test_buffers_are_used_again(self, backend: Any) -> None:
        with Builder() as b:
            x, w = b.input("x", (64, 64)), b.param("w", (64, 64))
            y = x
            for _ in range(8):
                y = y @ w
        graph = b.build({"y": y})
        sizes = [
            backend.build(graph, BuildOptions(memory_planning=planning)).arena // (4 * 64 * 64)
            for planning in (True, False)
        ]
        assert sizes == [2, 7]

    def test_reports_and_source_of_a_model(self, backend: Any) -> None:
        """Read the reports of a small model: its memory, its kernels below comments of plugins."""
        from mithril.models import Linear, Relu, Sequential

        model = Sequential(Linear(8), Relu(), Linear(3))
        compiled = ml.compile(model, backend, shapes={"input": [4, 5]}, inference=True)
        assert "exact: one planned arena" in str(compiled.memory_report())
        assert not any(line.startswith("//") and "{" in line for line in str(compiled.source).splitlines())

    def test_arrays(self, backend: Any) -> None:
        """Compute with arrays in main memory, copy them on the device, and pickle them for processes without it."""
        data = np.arange(6, dtype=np.float32).reshape(2, 3)
        x = backend.array(data)
        np.testing.assert_array_equal(2.0 - x, 2.0 - data)
        np.testing.assert_array_equal(x == backend.array(data), np.ones((2, 3), bool))
        assert np.sum(x) == 15.0
        with pytest.raises(TypeError, match="__array_ufunc__"):
            x += 1.0
        copied = copy.deepcopy({"x": x})["x"]
        assert backend.is_array(copied)
        assert copied.buffer is not x.buffer
        for other in (copied, pickle.loads(pickle.dumps(x))):
            np.testing.assert_array_equal(np.asarray(other), data)

    def test_errors_name_the_device_and_the_remedy(self, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend.host, "largest_buffer", 1 << 20)
        with pytest.raises(ml.MemoryLimitError, match="has no room for an array of") as full:
            backend.zeros((1 << 10, 1 << 10))
        assert "largest array: 1.05 MB" in str(full.value)
        with pytest.raises(ml.BackendError, match=f"{backend.host.kind} has no device 9") as error:
            ml.CBackend(device=f"{self.device}:9").zeros((2,))
        assert "device 0:" in str(error.value)
        assert self.remedy in str(error.value)
        with pytest.raises(ml.BackendError, match="'second' is not the number of a device"):
            ml.CBackend(device=f"{self.device}:second")
        with pytest.raises(ml.OptionError, match="num_threads= concerns CPUs"):
            ml.CBackend(device=self.device, num_threads=2)

    def test_a_training_step_keeps_its_state_on_the_device(self, backend: Any) -> None:
        pytest.importorskip("mithril_train")
        from mithril.models import Linear, Relu, Sequential

        rng = np.random.default_rng(0)
        labels = rng.integers(0, 3, 64).astype(np.int32)
        points = (np.eye(3, 4)[labels] + 0.1 * rng.normal(size=(64, 4))).astype(np.float32)
        losses = {}
        for name in ("c", self.device):
            trainer = ml.Trainer(
                Sequential(Linear(8), Relu(), Linear(3)),
                ml.Adam(1e-2),
                loss="cross_entropy",
                backend=name,
                seed=0,
                progress=False,
            )
            losses[name] = trainer.fit(points, labels, epochs=2, batch_size=32)["loss"]
        np.testing.assert_allclose(losses[self.device], losses["c"], rtol=1e-4)
        assert all(backend.is_array(value) for value in trainer.params.values())

    def test_threads_share_the_device(self, backend: Any) -> None:
        with Builder() as b:
            x = b.input("x", (8,))
            y = ops.tanh(x * 2.0) @ ops.reshape(x, shape=(8, 1))
        executable = backend.build(b.build({"y": y}))

        def call(k: int) -> Any:
            result = executable({}, {"x": backend.array(np.full(8, k, np.float32))})["y"]
            return np.asarray(result)[0]

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(call, range(40)))
        np.testing.assert_allclose(results, [8 * k * np.tanh(2.0 * k) for k in range(40)], rtol=1e-5)

    def test_hosts_are_opened_once(self, backend: Any) -> None:
        assert ml.CBackend(device=self.device).host is backend.host
        assert (self.device, 0) in backend.hosts
