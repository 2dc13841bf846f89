"""Errors that say which kernel, and so which layer, code could not be made for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mithril.base import BackendError, MithrilError
from mithril_cbackend.lowering.element.kernel import Kernel

REPORT = "this is a fault of mithril-cbackend: please report it with str(compiled.graph)"


@contextmanager
def kernel_error_context(kernel: Kernel) -> Iterator[None]:
    """What goes wrong while a kernel is written is said with the kernel's layer."""
    try:
        yield
    except MithrilError:
        raise
    except Exception as cause:
        raise failed(kernel, f"{type(cause).__name__}: {first_line(cause)}") from cause


def failed(kernel: Kernel, reason: str) -> BackendError:
    """Code could not be made for a kernel."""
    rows = []
    for node in kernel.nodes:
        operands = ", ".join("none" if v is None else str(v.type) for v in node.operands)
        rows.append(f"{node.op.name}({operands}) gives {', '.join(str(v.type) for v in node.results)}")
    origin = str(kernel.anchor.origin)
    return BackendError(
        f"the C backend cannot make code for '{kernel.name()}'",
        facts=[*([origin] if origin else []), *rows, reason],
        hint=REPORT,
    )


def first_line(cause: BaseException) -> str:
    return next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
