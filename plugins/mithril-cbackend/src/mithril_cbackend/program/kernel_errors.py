"""Compile errors with the kernel and the layer that failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mithril.graph import BackendError, MithrilError
from mithril_cbackend.lowering.element.kernel import Kernel

REPORT = "this is a bug in mithril-cbackend: please report it with str(compiled.graph)"


@contextmanager
def kernel_error_context(kernel: Kernel) -> Iterator[None]:
    """Convert exceptions of a kernel's template to errors with the kernel's layer."""
    try:
        yield
    except MithrilError:
        raise
    except Exception as cause:
        raise failed(kernel, f"{type(cause).__name__}: {first_line(cause)}") from cause


def failed(kernel: Kernel, reason: str) -> BackendError:
    """Return the error of a kernel that cannot be compiled."""
    rows = []
    for node in kernel.nodes:
        operands = ", ".join("none" if v is None else str(v.type) for v in node.operands)
        rows.append(f"{node.op.name}({operands}) -> {', '.join(str(v.type) for v in node.results)}")
    origin = str(kernel.anchor.origin)
    return BackendError(
        f"backend 'c' cannot compile the kernel '{kernel.name()}'",
        facts=[*([origin] if origin else []), *rows, reason],
        hint=REPORT,
    )


def first_line(cause: BaseException) -> str:
    return next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
