"""User names as C identifiers; ``mithril.graph.quoted`` quotes them in comments and strings."""

# ruff: noqa: SIM905 - tables of names read better without quotes

from __future__ import annotations

import re

KEYWORDS = frozenset(
    """
    auto break case char const continue default do double else enum extern float for goto if inline int long register
    restrict return short signed sizeof static struct switch typedef union unsigned void volatile while
    alignas alignof bool constexpr false nullptr static_assert thread_local true typeof typeof_unqual
    and and_eq asm bitand bitor catch char8_t char16_t char32_t class co_await co_return co_yield compl concept
    const_cast consteval constinit decltype delete dynamic_cast explicit export friend mutable namespace new noexcept
    not not_eq operator or or_eq private protected public reinterpret_cast requires static_cast template this throw try
    typeid typename using virtual wchar_t xor xor_eq
    """.split()
)  # keywords of C up to C23, and of C++, which includes the header as well
LIBM = """
    acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh erf erfc exp exp2 expm1 fabs fdim floor fma fmax
    fmin fmod frexp hypot ilogb ldexp lgamma llrint llround log log10 log1p log2 logb lrint lround modf nan nearbyint
    nextafter nexttoward pow remainder remquo rint round scalbln scalbn sin sinh sqrt tan tanh tgamma trunc
    """.split()
LIBRARY = frozenset(
    [
        *(f"{name}{suffix}" for name in LIBM for suffix in ("", "f", "l")),
        *(f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64, "ptr", "max")),
        *"""
        NAN INFINITY NULL INT32_MIN INT64_MIN INT64_C UINT64_C isnan isinf isfinite isnormal signbit fpclassify HUGE_VAL
        memcpy memset memmove memcmp memchr strcmp strcpy strlen size_t float_t double_t abs labs llabs signgam gamma
        j0 j1 jn y0 y1 yn index main printf fprintf malloc free exit errno stdin stdout stderr linux unix
        """.split(),
    ]
)  # functions, types and macros of the included headers, and builtins that compilers warn about
OWN = frozenset(
    """
    self run at ready other vector lanes f16 f32 f64 i16 i32 i64 u16 u32 u64
    bits_int32 bits_uint32 bits_int64 float_of_int32 float_of_uint32 double_of_int64
    VECTOR CONST_VECTOR EVERY SHUFFLE PARALLEL PREFETCH ROLLED WIDE LANES MAY_ALIAS
    int8x4s unsigned_int8x4 floats INT8X4_TYPE STEP_U8S8 PART_U8S8 STEP_BF16 DOT_S8S8 EVERY_INT8X4 dot_int8x4
    GROUP_NUMBERS GROUP_HALVES GROUP_CODES GROUP_FLOATS GROUP_BYTES GROUP_ZERO GROUP_DOT GROUP_PART
    group_numbers group_halves group_quantized group_floats group_bytes group_table group_bytes_table
    """.split()
)  # names of the generated file
TAKEN = KEYWORDS | LIBRARY | OWN
_NUMBERED = re.compile(r"(turn|trip)_")  # prefixes of numbered names of the generated file

# With ``_t`` appended these are types of the C library or of POSIX.
_TYPES = frozenset(
    """
    blkcnt blksize char16 char32 char8 clock clockid cnd constraint_handler dev div double errno fenv fexcept float fpos
    fsblkcnt fsfilcnt gid id imaxdiv ino jmp_buf key ldiv lldiv locale max_align mbstate mode mtx nlink nullptr off
    once_flag pid pthread ptrdiff regex rsize sig_atomic siginfo sigset size ssize suseconds thrd time timer tss uid
    va_list wchar wctrans wctype wint intptr uintptr intmax uintmax
    """.split()
)
_SIZED = re.compile(r"u?int(_least|_fast)?\d+", re.ASCII)


def is_model_name(name: str) -> bool:
    """Whether ``name_t``, ``name_run`` and similar names are not reserved by C."""
    plain = re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) is not None
    return plain and name not in _TYPES and not _SIZED.fullmatch(name)


def is_taken(name: str) -> bool:
    """Whether an identifier already means something in a generated file."""
    return name in TAKEN or _NUMBERED.match(name) is not None


def identifier(name: str) -> str:
    """Return the name with all characters replaced that are invalid in a C identifier."""
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"_{plain}" if plain[:1].isdigit() or not plain else plain


def unique(name: str, used_names: set[str]) -> str:
    """Reserve an identifier whose upper-case spelling is unused, since macros are named after it."""
    plain = identifier(name)
    if is_taken(plain):
        plain = f"v_{plain}"
    while plain.upper() in used_names:
        plain += "_"
    used_names.add(plain.upper())
    return plain
