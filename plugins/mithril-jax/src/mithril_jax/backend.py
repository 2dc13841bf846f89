"""``ml.JaxBackend``: generated JAX source, compiled by XLA."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mithril.codegen import Lowerings
from mithril.errors import BackendError, OptionError
from mithril.graph import Graph, iterate
from mithril.runtime.backend import BuildOptions, as_numpy
from mithril.runtime.source_backend import Forward, SourceBackend, SourceExecutable
from mithril.types import DType, dtype as as_dtype
from mithril_jax.lowering import table

PLATFORMS = {"gpu": "cuda", "cuda": "cuda", "cpu": "cpu", "tpu": "tpu"}


class JaxBackend(SourceBackend):
    """Arrays are JAX's, on one device; programs are compiled by XLA unless ``jit=False``.

    ``pre_allocate`` decides whether XLA takes the GPU's memory at once; it counts only before JAX is first used.
    """

    name = "jax"
    devices = ("cpu", "gpu", "cuda", "tpu")
    tables: ClassVar[Mapping[str, Lowerings]] = {"portable": table}

    def __init__(
        self,
        *,
        device: str | None = None,
        dtype: Any = None,
        precision: str | None = None,
        pre_allocate: bool | None = None,
    ) -> None:
        if pre_allocate is not None:
            _pre_allocate(pre_allocate)
        super().__init__(device=device or jax.default_backend(), dtype=dtype, precision=precision)
        self.jax_device = self._find(self.device)

    def _find(self, device: str) -> Any:
        platform, _, number = device.partition(":")
        try:
            found = jax.devices(PLATFORMS[platform])
            return found[int(number) if number else 0]
        except (RuntimeError, IndexError, ValueError) as error:
            raise BackendError(
                f"JAX has no device '{device}' here",
                facts=[f"there is: {', '.join(str(d) for d in jax.devices())}", str(error).splitlines()[0]],
                hint="install the JAX build for that hardware, or choose another device",
            ) from None

    def families(self) -> tuple[str, ...]:
        platform = self.device.split(":")[0]
        return ("gpu", "nvidia") if platform in ("gpu", "cuda") else (platform,)

    # -- building ----------------------------------------------------------------------------------------------------
    def finish(self, forward: Forward, graph: Graph, options: BuildOptions) -> Forward:
        wide = _needs_64_bits(graph)
        call: Any = forward
        if options.jit is not False:
            call = jax.jit(forward, **_jit_arguments(options))
        elif options.jit_options:
            options.decisions.record("ignored", "jit_options mean nothing with jit=False")
        if not wide:
            return call  # type: ignore[no-any-return]

        def in_64_bits(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
            with jax.enable_x64(True):
                return call(params, inputs)  # type: ignore[no-any-return]

        return in_64_bits

    def differentiated(self, forward: Forward, of: tuple[str, ...], wrt: tuple[str, ...]) -> Forward:
        def with_gradients(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
            def outputs(wanted: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
                made = forward(
                    {name: wanted.get(name, x) for name, x in params.items()},
                    {name: wanted.get(name, x) for name, x in inputs.items()},
                )
                return {name: made[name] for name in of}, made

            wanted = {name: params[name] if name in params else inputs[name] for name in wrt}
            _, pull, made = jax.vjp(outputs, wanted, has_aux=True)
            (found,) = pull({name: inputs[f"grad/{name}"] for name in of})
            return {**made, **{f"grad/{name}": found[name] for name in wrt}}

        return with_gradients

    # -- arrays ------------------------------------------------------------------------------------------------------
    def array(self, data: Any, dtype: Any = None) -> jax.Array:
        if isinstance(data, jax.Array) and dtype is None:
            return jax.device_put(data, self.jax_device)
        made = as_numpy(data, self.dtype)
        if dtype is not None:
            made = made.astype(as_dtype(dtype).numpy)
        with jax.enable_x64(True) if made.dtype.itemsize == 8 else nullcontext():
            return jax.device_put(jnp.asarray(made), self.jax_device)

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def is_array(self, x: Any) -> bool:
        return isinstance(x, jax.Array)

    def build_step(self, graph: Graph) -> SourceExecutable:
        """Jitted, as one dispatch per primitive would be measured otherwise."""
        return self.build(graph, BuildOptions(jit=True))

    def synchronize(self, value: Any = None) -> None:
        if value is not None:
            jax.block_until_ready(value)


def _needs_64_bits(graph: Graph) -> bool:
    values = [i.type.dtype for i in graph.inputs]
    values += [v.dtype for node, _ in iterate(graph) for v in node.results]
    return any(_wide(d) for d in values)


def _wide(dtype: DType) -> bool:
    return dtype.bits == 64


def _jit_arguments(options: BuildOptions) -> dict[str, Any]:
    """What of ``jit_options`` goes to ``jax.jit``; its arguments are (params, inputs)."""
    given = dict(options.jit_options)
    out: dict[str, Any] = {}
    donated = given.pop("donate_argnums", ())
    donated = (donated,) if isinstance(donated, int) else tuple(donated)
    if any(n not in (0, 1) for n in donated):
        raise OptionError(
            f"jit_options: donate_argnums={donated} names an argument that is not there",
            facts=["0 is params, 1 is inputs"],
        )
    if donated:
        out["donate_argnums"] = donated
    if given.pop("static_argnums", ()):
        options.decisions.record(
            "ignored", "jit_options: static_argnums, because params and inputs are arrays; fix inputs with constants="
        )
    if "compiler_options" in given:
        out["compiler_options"] = dict(given.pop("compiler_options"))
    if given:
        raise OptionError(
            f"jit_options: '{next(iter(given))}' is unknown to the JAX backend",
            facts=["known: donate_argnums, static_argnums, compiler_options"],
        )
    return out


def _pre_allocate(wanted: bool) -> None:
    value = "true" if wanted else "false"
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", value) != value:
        raise OptionError(
            f"pre_allocate={wanted} contradicts the environment variable XLA_PYTHON_CLIENT_PREALLOCATE",
            hint="set one of them",
        )
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = value
