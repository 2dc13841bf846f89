"""Import of TVM and its node classes, whose names change between releases: only this package uses them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from mithril_cbackend.cpu_info import processors
from mithril_cbackend.module_loader import without_torch, without_unused_parts


def _import_tvm() -> tuple[Any, Any]:
    os.environ.setdefault("TVM_NUM_THREADS", str(processors()))  # upper limit of TVM's thread pool
    with without_torch(), without_unused_parts():
        import tvm
        import tvm_ffi
    return tvm, tvm_ffi


tvm, tvm_ffi = _import_tvm()
from tvm import te, tirx  # noqa: E402
from tvm.ir import PointerType, PrimType  # noqa: E402
from tvm.tirx import stmt  # noqa: E402
from tvm.tirx.analysis import undefined_vars  # noqa: E402

nodes = SimpleNamespace(  # node classes that the C printer distinguishes
    **{
        n: getattr(tirx, n)
        for n in [
            "Add", "Sub", "Mul", "Div", "Mod", "EQ", "NE", "LT", "LE", "GT", "GE", "And", "Or", "Not", "Select",
            "Cast", "LShift", "RShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot",
        ]
    },
    **{
        n: getattr(stmt, n)
        for n in [
            "Bind", "For", "While", "BufferStore", "AllocBuffer", "DeclBuffer", "IfThenElse", "SeqStmt",
            "Evaluate", "Return", "AttrStmt",
        ]
    },
    Var=tirx.Var,
    Ramp=tirx.Ramp,
    Shuffle=tirx.Shuffle,
    IntImm=tirx.IntImm,
    FloatImm=tirx.FloatImm,
    StringImm=tvm.ir.StringImm if hasattr(tvm.ir, "StringImm") else tirx.StringImm,
    Load=tvm.ir.TensorLoad,
    Call=tvm.ir.Call,
)  # fmt: skip

__all__ = ["PointerType", "PrimType", "nodes", "stmt", "te", "tirx", "tvm", "tvm_ffi", "undefined_vars"]
