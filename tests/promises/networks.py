"""Return the three networks of the probes, and the counts of their programs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import mithril as ml
from mithril import models as m


@dataclass(frozen=True)
class Network:
    """Return a model and the shape of its input."""

    make: Callable[[], Any]
    shape: tuple[int, ...]

    def input(self, rows: int | None = None) -> np.ndarray[Any, Any]:
        shape = self.shape if rows is None else (rows, *self.shape[1:])
        return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def perceptron() -> Any:
    return m.Model(m.Linear(24), m.LayerNorm(24), m.Relu(), m.Linear(24), m.Gelu(), m.Linear(4))


def convolutions() -> Any:
    """Return a stem, a residual block and a head."""
    model = m.Model()
    model |= m.Conv2d(3, 8, kernel_size=3, padding=1)(input="input", output="stem")
    model |= m.BatchNorm2d(8)(input="stem", output="normed")
    model |= m.Relu()(input="normed", output="active")
    model |= m.Conv2d(8, 8, kernel_size=3, padding=1)(input="active", output="inner")
    model |= m.BatchNorm2d(8)(input="inner", output="inner_normed")
    model |= m.Add()(left="inner_normed", right="active", output="sum")
    model |= m.Relu()(input="sum", output="joined")
    model |= m.GlobalAvgPool2d()(input="joined", output="pooled")
    model |= m.Linear(4)(input="pooled", output="output")
    return model


def encoder() -> Any:
    return m.Model(m.TransformerEncoderLayer(16, 2, 32), m.Linear(4))


MLP = Network(perceptron, (8, 16))
CNN = Network(convolutions, (2, 3, 8, 8))
ENCODER = Network(encoder, (2, 6, 16))
NETWORKS = (MLP, CNN, ENCODER)


def compiled(network: Network, engine: Any, **options: Any) -> Any:
    """Compile a network; options that an engine ignores are recorded without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ml.OptionWarning)
        return ml.compile(network.make(), engine, **{"shapes": {"input": list(network.shape)}, **options})


def bound(network: Network, engine: Any, **options: Any) -> Any:
    """Compile a network, bind drawn parameters and call it once."""
    subject = compiled(network, engine, **options)
    subject.bind(subject.randomize_params(seed=0))
    subject({"input": network.input()})
    return subject


def called(subject: Any, network: Network, rows: int | None = None) -> np.ndarray[Any, Any]:
    """Return the output of a bound model."""
    return np.asarray(subject.backend.to_numpy(subject({"input": network.input(rows)})["output"]), np.float32)


def slopes(network: Network) -> np.ndarray[Any, Any]:
    """Return a gradient of the output."""
    shape = (network.shape[0], 4) if network is CNN else (*network.shape[:-1], 4)
    return np.ones(shape, np.float32)


def nodes(subject: Any) -> int:
    return len(subject.programs[-1].graph.nodes)


VIEW = re.compile(r" = (np|jnp|mx)\.(reshape|transpose)\(")


def statements(subject: Any) -> list[str]:
    """Return the lines of the generated function that compute something other than a view."""
    body = subject.source.partition("\ndef forward(params, inputs):\n")[2].splitlines()
    names = ("params[", "inputs[", "    outputs", "    return", "    del ")
    lines = [line for line in body if line.startswith("    ") and not any(name in line for name in names)]
    return [line for line in lines if not VIEW.search(line)]


def launches(subject: Any) -> int:
    """Return the kernels that one call of the latest program launches."""
    program = subject.programs[-1]
    executable, engine = program.executable, subject.backend.name
    if engine == "c":
        return len(re.findall(r"^  k\d+_\w+\(", executable.source.rpartition("static void run(")[2], re.M))
    if engine == "ggml":
        return len(executable.steps)
    if engine not in ("torch", "jax"):
        return len(statements(subject))
    arrays = {i.name: subject.backend.zeros(i.type.shape, i.type.dtype) for i in executable.graph.inputs}
    params = {i.name: arrays[i.name] for i in executable.graph.with_role("param")}
    inputs = {name: x for name, x in arrays.items() if name not in params}
    if engine == "jax":
        return _of_xla(executable, params, inputs)
    with _counted() as seen:
        executable.forward(params, inputs)
    return seen.number


def _of_xla(executable: Any, params: Any, inputs: Any) -> int:
    import jax

    text = jax.jit(executable.forward).lower(params, inputs).compile().as_text()
    entry = text.rpartition("\nENTRY ")[2]
    free = ("parameter(", "tuple(", "bitcast(", "constant(", "get-tuple-element(")
    return sum(" = " in line and not any(f" {name}" in line for name in free) for line in entry.splitlines())


VIEWS_OF_TORCH = (
    "t transpose permute view _unsafe_view reshape expand detach unsqueeze squeeze slice select alias".split()
)


def _counted() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counted(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.number += function.overloadpacket.__name__ not in VIEWS_OF_TORCH
            return function(*args, **(kwargs or {}))

    return Counted()


def each(measure: Callable[[Network], tuple[float, float]]) -> Iterator[tuple[float, float]]:
    return (measure(network) for network in NETWORKS)
