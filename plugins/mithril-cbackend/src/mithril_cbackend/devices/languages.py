"""The languages of kernels on devices: functions that their text may call, and how TVM's text becomes one program."""

from __future__ import annotations

from dataclasses import dataclass

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

    def finished(self, text: str, groups: int) -> str:
        """Return the text that TVM printed for a number of workgroups, corrected."""
        return text


OPENCL = Language(
    "opencl",
    prelude="#ifdef cl_khr_fp64\n#pragma OPENCL EXTENSION cl_khr_fp64 : enable\n#endif\n"
    + "".join(f"#define {f}f {f}\n" for f in C_FUNCTIONS)
    + """#define float32_from_int32(x) as_float((int)(x))
#define float32_from_uint32(x) as_float((uint)(x))
#define int32_from_float32(x) as_int((float)(x))
#define uint32_from_float32(x) as_uint((float)(x))
#define float64_from_int64(x) as_double((long)(x))
float float_from_half(ushort x) {
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
