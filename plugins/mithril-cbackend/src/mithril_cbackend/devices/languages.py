"""The languages of kernels on devices: functions that their text may call, and how TVM's text becomes one program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mithril_cbackend.c_names import KEYWORDS, LIBRARY

C_FUNCTIONS = (
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "expm1"),
    *("log", "log1p", "sqrt", "floor", "ceil", "trunc", "rint", "fabs", "erf", "erfc", "atan2", "fmod", "pow"),
    "copysign",
)


@dataclass(frozen=True)
class Language:
    """A language; its prelude defines the functions that ``portable.py`` calls and that TVM does not print."""

    name: str
    narrows: bool = False  # whether it has no elements of 8, 16 and 64 bits
    selects: bool = False  # whether TVM prints a selection of two values correctly
    binds: bool = True  # whether TVM prints named values in linear time
    tests_nan: bool = False  # whether drivers replace comparisons by others that differ for nan
    reserved: frozenset[str] = frozenset()  # words that names of kernels must not be
    prelude: str = ""
    target: Mapping[str, str] = field(default_factory=dict)  # options of TVM's target
    generator: str | None = None  # the module that registers parts of TVM's generator, if they are in Python

    def finished(self, text: str, groups: int) -> str:
        """Return the text that TVM printed for a number of workgroups, corrected."""
        return text


OPENCL = Language(
    "opencl",
    prelude="#ifdef cl_khr_fp64\n#pragma OPENCL EXTENSION cl_khr_fp64 : enable\n#endif\n"
    + "".join(f"#define {f}f {f}\n" for f in C_FUNCTIONS)
    + "".join(
        f"#define {target}_from_{source}(x) as_{as_target}(({as_source})(x))\n"
        for types in (
            (("float32", "float"), ("int32", "int"), ("uint32", "uint")),
            (("float64", "double"), ("int64", "long"), ("uint64", "ulong")),
        )
        for target, as_target in types
        for source, as_source in types
        if target != source
    )
    + """float float_from_half(ushort x) {
  return vload_half(0, (const half *)&x);
}
ushort half_from_float(float x) {
  ushort bits;
  vstore_half_rte(x, 0, (half *)&bits);
  return bits;
}
""",
    reserved=frozenset(
        ("kernel", "global", "local", "constant", "private", "half", "image", "vec", "dot", "cross", "length", "step")
        + ("mix", "sign", "select")
    ),
)

_CUDA_PRELUDE = """typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
#define float32_from_int32(x) __int_as_float((int)(x))
#define float32_from_uint32(x) __uint_as_float((unsigned)(x))
#define int32_from_float32(x) __float_as_int(x)
#define uint32_from_float32(x) __float_as_uint(x)
#define int32_from_uint32(x) ((int)(x))
#define uint32_from_int32(x) ((uint)(x))
#define float64_from_int64(x) __longlong_as_double((long long)(x))
#define float64_from_uint64(x) __longlong_as_double((long long)(x))
#define int64_from_float64(x) __double_as_longlong(x)
#define uint64_from_float64(x) ((uint64_t)__double_as_longlong(x))
#define int64_from_uint64(x) ((int64_t)(x))
#define uint64_from_int64(x) ((uint64_t)(x))
static __device__ float float_from_half(unsigned short x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x));
  return result;
}
static __device__ unsigned short half_from_float(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
"""


@dataclass(frozen=True)
class CUDALanguage(Language):
    """CUDA C++."""

    def finished(self, text: str, groups: int) -> str:
        # TVM's helpers before it need headers, and it is declared first.
        return text[text.rindex('extern "C" __global__') :]


CUDA = CUDALanguage(
    "cuda",
    prelude=_CUDA_PRELUDE,
    target={"arch": "sm_80"},  # of TVM's instructions for tensor cores, which kernels do not have
    generator="tvm.backend.cuda.codegen.header",
    reserved=KEYWORDS
    | LIBRARY
    | {"uchar", "ushort", "uint", "blockIdx", "threadIdx", "blockDim", "gridDim", "warpSize"},
)
