"""A driver of CUDA in main memory, and kernels as C: the path of a program to a GPU without one."""

import ctypes
import datetime
import hashlib
import re
import shlex
import subprocess
from pathlib import Path

from mithril_cbackend.toolchains import HOST

PARTS = 20  # of the operations, one of which is compiled and run on a day
TODAY = datetime.date.today().toordinal() % PARTS
HERE = Path(__file__).parent
PRELUDE = """#include <math.h>
#include <stdint.h>
#include <stdbool.h>
#define uchar unsigned char
#define ushort unsigned short
#define uint unsigned
#define ulong unsigned long
#define __global__
#define __launch_bounds__(n)
#define alignas(n)
#define __restrict__
static __thread struct { unsigned x; } blockIdx, threadIdx;
static inline float float_from_half(unsigned short x) { union { unsigned short i; _Float16 f; } u = {x}; return u.f; }
static inline unsigned short half_from_float(float x) { union { _Float16 f; unsigned short i; } u = {x}; return u.i; }
"""
for types in (
    {"float32": "float", "int32": "int", "uint32": "unsigned"},
    {"float64": "double", "int64": "int64_t", "uint64": "uint64_t"},
):
    for target, to in types.items():
        for source, of in types.items():
            name = f"static inline {to} {target}_from_{source}({of} x)"
            PRELUDE += f"{name} {{ union {{ {of} x; {to} y; }} u = {{x}}; return u.y; }}\n"
KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\((.*?)\) \{')


def built(source, target):
    command = [*shlex.split(HOST.require()), "-shared", "-fPIC", "-w", "-O1", "-o", target, source, "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    return target


def driver(folder):
    return str(built(HERE / "stub_driver.c", folder / "libcuda.so.1"))


def compiler(folder):
    """Return a function in place of ``nvrtc.compiled`` whose code is the path of a shared library."""

    def compiled(texts, capability, assembly=False):
        text = "\n".join(texts)
        runs = []
        for name, parameters in KERNEL.findall(text):
            types = [p.rpartition("*")[0] + "*" for p in parameters.split(", ")]
            arguments = ", ".join(f"*({kind} *)p[{k}]" for k, kind in enumerate(types))
            # In reverse: no thread may need one before it.
            runs.append(
                f"void run_{name}(void **p, unsigned groups, unsigned threads) {{\n"
                "  for (unsigned b = groups; b-- > 0;) for (unsigned t = threads; t-- > 0;) {\n"
                f"    blockIdx.x = b; threadIdx.x = t; {name}({arguments});\n  }}\n}}\n"
            )
        content = PRELUDE + text.replace('extern "C" ', "static ") + "".join(runs)
        path = Path(folder) / f"{hashlib.sha256(content.encode()).hexdigest()[:20]}.so"
        if not path.exists():
            path.with_suffix(".c").write_text(content)
            built(path.with_suffix(".c"), path)
        return str(path).encode() + b"\0"

    return compiled


def control(path):
    library = ctypes.CDLL(path)
    library.stub_calls.restype = ctypes.c_char_p
    library.stub_used.restype = ctypes.c_size_t
    library.stub_set.argtypes = (ctypes.c_int, ctypes.c_size_t)
    library.stub_fail.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_int)
    return library
