"""The instructions that tiles select by the features of a CPU: one table, for each task the fastest first.

``lanes`` are 32-bit groups of a vector. Where a CPU has no row, tiles are PORTABLE: plain arithmetic of vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

PAIRS, BYTES = "bf16", "u8s8"  # products of int8x4 groups: two bfloat16, or unsigned by signed bytes
NUMBERS, SHUFFLES = "numbers", "shuffles"  # look-ups in a table of 16: float32, or bytes
AMX, NATIVE, PAIRWISE, PERMUTED, BLENDED, PORTABLE = "amx", "native", "pairwise", "permuted", "blended", "portable"


@dataclass(frozen=True)
class Instruction:
    """An instruction by LLVM's name, and the features that it needs in LLVM's names."""

    task: str
    level: str
    lanes: int
    function: str
    features: frozenset[str]


_TABLE = [
    # bfloat16 has vectors of 512 bits only: without AVX-512VL (see UNSOUND in machine_code.py) shorter ones do not
    # exist. Every CPU with AMX has both.
    (PAIRS, AMX, 16, "tdpbf16ps", "avx512bw avx512bf16 amx-bf16"),
    (PAIRS, NATIVE, 16, "avx512bf16.dpbf16ps.512", "avx512bw avx512bf16"),
    (BYTES, AMX, 16, "tdpbusd", "avx512bw amx-int8"),
    (BYTES, NATIVE, 16, "avx512.vpdpbusd.512", "avx512bw avx512vnni"),
    (BYTES, NATIVE, 8, "avx512.vpdpbusd.256", "avxvnni"),
    (BYTES, PAIRWISE, 16, "avx512.pmaddw.d.512", "avx512bw"),
    (BYTES, PAIRWISE, 8, "avx2.pmadd.wd", "avx2"),
    (BYTES, PAIRWISE, 4, "sse2.pmadd.wd", "sse2"),
    (NUMBERS, PERMUTED, 16, "avx512.permvar.sf.512", "avx512bw"),  # 16 numbers fill one register
    (NUMBERS, BLENDED, 8, "avx2.permps", "avx2"),  # 16 numbers fill two, of which the highest bit selects one
    (SHUFFLES, NATIVE, 16, "avx512.pshuf.b.512", "avx512bw"),
    (SHUFFLES, NATIVE, 8, "avx2.pshuf.b", "avx2"),
]
INSTRUCTIONS = [
    Instruction(task, level, lanes, function, frozenset(features.split()))
    for task, level, lanes, function, features in _TABLE
]
# Features that kernels select instructions by. LLVM knows a CPU by its model number: it may have more of them than its
# name implies.
SELECTED = tuple(sorted({"amx-tile"}.union(*(i.features for i in INSTRUCTIONS))))


def fastest(task: str, features: frozenset[str], lanes: int) -> str:
    """Return the level of the fastest instruction of a CPU for a task in vectors of this size."""
    levels = (i.level for i in INSTRUCTIONS if (i.task, i.lanes) == (task, lanes) and i.features <= features)
    return next(levels, PORTABLE)


def function(task: str, level: str, lanes: int) -> str:
    """Return LLVM's name of an instruction."""
    names = (i.function for i in INSTRUCTIONS if (i.task, i.level, i.lanes) == (task, level, lanes))
    return f"llvm.x86.{next(names)}"
