"""Tiles of products with quantized values as C: look-ups and dot products of the CPU, else plain loops."""

from __future__ import annotations

from mithril_cbackend.lowering.int8x4.c_tiles import TYPES
from mithril_cbackend.lowering.int8x4.group_tiles import COLUMNS, GroupForm

NUMBERS = """\
#ifndef GROUP_NUMBERS
#define GROUP_NUMBERS
static inline floats group_numbers(const void *from) {
  floats result;
  memcpy(&result, from, sizeof result);
  return result;
}
#endif
"""
HALVES = """\
#ifndef GROUP_HALVES
#define GROUP_HALVES
static inline floats group_halves(const void *from) {
  uint16_t halves[LANES];
  uint32_t bits[LANES];
  floats result;
  memcpy(halves, from, sizeof halves);
  for (int j = 0; j < LANES; ++j) bits[j] = (uint32_t)(halves[j] & 0x7fff) << 13 | (uint32_t)(halves[j] >> 15) << 31;
  memcpy(&result, bits, sizeof result);
  return result * 0x1p112f;
}
#endif
"""
CODES = """\
#ifndef GROUP_CODES
#define GROUP_CODES
static inline floats group_quantized(const void *from) {
  int8_t quantized[LANES];
  floats result;
  memcpy(quantized, from, sizeof quantized);
  for (int j = 0; j < LANES; ++j) result[j] = (float)quantized[j];
  return result;
}
#endif
"""
FLOATS = """\
#ifndef GROUP_FLOATS
#define GROUP_FLOATS
static inline floats group_floats(const float *table, int8x4s quantized) {
  floats result;
#if defined(__x86_64__) && defined(__AVX512F__) && LANES == 16
  const floats numbers = *(const floats *)table;
  __asm__("vpermps %2, %1, %0" : "=v"(result) : "v"(quantized), "v"(numbers));
#else
  for (int j = 0; j < LANES; ++j) result[j] = table[quantized[j] & 15];
#endif
  return result;
}
#endif
"""
BYTES = """\
#ifndef GROUP_BYTES
#define GROUP_BYTES
#if (defined(__x86_64__) && defined(__AVX512VNNI__) && LANES == 16) || \\
    (defined(__AVXVNNI__) && defined(__AVX2__) && LANES == 8)
typedef int8x4s group_table;
static inline group_table group_bytes_table(const uint8_t *table) {
  uint8_t bytes[4 * LANES];
  int8x4s result;
  for (int j = 0; j < 4 * LANES; ++j) bytes[j] = table[j & 15];
  memcpy(&result, bytes, sizeof result);
  return result;
}
static inline int8x4s group_bytes(group_table table, int8x4s quantized) {
  int8x4s result;
  __asm__("vpshufb %2, %1, %0" : "=v"(result) : "v"(table), "v"(quantized));
  return result;
}
#define GROUP_ZERO 128
#if LANES == 16
#define GROUP_DOT(sum, numbers, int8x4) \\
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(numbers), "v"((int8x4) - (int8x4s){0}))
#else
#define GROUP_DOT(sum, numbers, int8x4) \\
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(numbers), "x"((int8x4) - (int8x4s){0}))
#endif
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD) && LANES == 4 /* signed bytes, 128 smaller */
#include <arm_neon.h>
#define GROUP_ZERO 0
typedef uint8x16_t group_table;
static inline group_table group_bytes_table(const uint8_t *table) { return vld1q_u8(table); }
static inline int8x4s group_bytes(group_table table, int8x4s quantized) {
  return (int8x4s)vqtbl1q_u8(table, (uint8x16_t)quantized);
}
#define GROUP_DOT(sum, numbers, int8x4) \\
  (sum = (int8x4s)vdotq_s32( \\
       (int32x4_t)(sum), (int8x16_t)((numbers) ^ -0x7f7f7f80), (int8x16_t)((int8x4) - (int8x4s){0})))
#else
#define GROUP_ZERO 128
typedef const uint8_t *group_table;
static inline group_table group_bytes_table(const uint8_t *table) { return table; }
static inline int8x4s group_bytes(group_table table, int8x4s quantized) {
  uint8_t bytes[4 * LANES];
  int8x4s result;
  memcpy(bytes, &quantized, sizeof bytes);
  for (int j = 0; j < 4 * LANES; ++j) bytes[j] = table[bytes[j]];
  memcpy(&result, bytes, sizeof result);
  return result;
}
#define GROUP_PART(numbers, int8x4, p) \\
  (((numbers) >> (8 * (p)) & 255) * ((int8_t)((uint32_t)(int8x4) >> (8 * (p))) - (int8x4s){0}))
#define GROUP_DOT(sum, numbers, int8x4) \\
  (sum += GROUP_PART(numbers, int8x4, 0) + GROUP_PART(numbers, int8x4, 1) + GROUP_PART(numbers, int8x4, 2) + \\
          GROUP_PART(numbers, int8x4, 3))
#endif
#endif
"""


def tile(name: str, form: GroupForm, rows: int) -> str:
    """Return the definition of the function that ``group_tiles.tile`` writes as LLVM IR."""
    lanes, vectors = form.lanes, range(form.vectors)
    cells = [(i, v) for i in range(rows) for v in vectors]
    kind, part = ("int8x4s", "int32_t") if form.is_bytes else ("floats", "float")
    steps = f"left += {form.per * (1 if form.is_bytes else 4)}, quantized += {4 * COLUMNS}"
    is_table = form.is_bytes and form.bits == 4
    scales = HALVES + CODES if form.nested else HALVES if form.is_half else NUMBERS
    inner = _floats if form.bits == 4 else _converted
    if form.is_bytes:
        inner = _bytes if form.bits == 4 else _numbers
    lines = [
        TYPES + scales + (BYTES if form.is_bytes else FLOATS if form.bits == 4 else ""),
        f"#ifndef {name.upper()}\n#define {name.upper()}\nstatic inline int32_t {name}(",
        "    const void *restrict a, int32_t stride, const void *restrict b, const void *restrict table,",
        "    const void *restrict sums, void *restrict c, int32_t groups) {",
        "  const char *left = a;",
        *(["  (void)stride;"] if rows == 1 else []),
        "  const char *head = b;",
        f"  const {part} *totals = sums;",
        *([] if form.has_sums else ["  (void)totals;"]),
        "  float *results = c;",
        *(["  const group_table numbers = group_bytes_table(table);"] if is_table else []),
        *(["  (void)table;"] if form.bits == 8 else []),
        *(["  const float first = *(const float *)table;"] if form.has_first else []),
        *(["  const uint32_t first = *(const uint8_t *)table * 0x01010101u;"] if form.upper and form.is_bytes else []),
        "  floats " + ", ".join(f"s{i}_{v} = {{0}}" for i, v in cells) + ";",
        *(["  const char *factors = b;"] if form.nested else []),
        f"  for (int32_t g = 0; g < groups; ++g, head += {form.size}) {{",
        *([f"    if (g % {form.nested} == 0) factors = head, head += {form.factors};"] if form.nested else []),
        f"    {kind} " + ", ".join(f"p{i}_{v} = {{0}}" for i, v in cells) + ";",
        *(
            f"    int8x4s upper{v} = *(const int8x4s *)(head + {form.head + 4 * v * lanes});"
            for v in vectors
            if form.upper
        ),
        f"    const char *quantized = head + {form.head + form.upper};",
        f"    for (int32_t q = 0; q < {form.group // form.per}; ++q, {steps}) {{",
        *(f"      const int8x4s w{v} = *(const int8x4s *)(quantized + {4 * lanes * v});" for v in vectors),
        *inner(rows, form),
        "    }",
    ]
    for v in vectors:
        lines.append(f"    const floats scale{v} = {_number(form, 0, v)};")
        offset = [_number(form, 1, v)] * form.has_offsets + [f"scale{v} * first"] * form.has_first
        if offset:
            lines.append(f"    const floats offset{v} = {' + '.join(offset)};")
    for i, v in cells:
        total = f"totals[(int64_t)groups * {i} + g]" if i else "totals[g]"
        value = f"p{i}_{v}"
        if form.is_bytes:
            value = f"__builtin_convertvector({value} - (int8x4s){{0}} - {total} * GROUP_ZERO, floats)"
        lines.append(f"    s{i}_{v} += {value} * scale{v};")
        if form.has_offsets or form.has_first:
            lines.append(f"    s{i}_{v} += offset{v} * (float){total};")
    lines.append("  }")
    lines += [f"  *(floats *)(results + {i * COLUMNS + v * lanes}) = s{i}_{v};" for i, v in cells]
    lines += ["  return 0;", "}", "#endif", ""]
    return "\n".join(lines).replace("LANES", str(lanes))


def _row(i: int, offset: int) -> str:
    start = f"left + (int64_t)stride * {i}" if i else "left"
    return f"{start} + {offset}" if offset else start


def _number(form: GroupForm, part: int, v: int) -> str:
    """Return the scales (part 0) or offsets (part 1) of a vector of columns."""
    start = part * form.numbers + v * form.lanes * form.numbers // COLUMNS
    if form.nested:
        return f"group_quantized(head + {start}) * group_halves(factors + {2 * (part * COLUMNS + v * form.lanes)})"
    return f"{'group_halves' if form.is_half else 'group_numbers'}(head + {start})"


def _joined(form: GroupForm, four: int) -> list[str]:
    """Return lines that set four quantized values of each column, or numbers plus 128, and move the next upper bits."""
    lines, count = [], form.bits - 4
    for v in range(form.vectors):
        low = f"({f'w{v} >> 4' if four else f'w{v}'} & 0x0f0f0f0f)"
        high = f"(upper{v} << 4 & 0x{0x10101010 * ((1 << count) - 1):x})"
        quantized = f"(int8x4s)((unsigned_int8x4)({low} | {high}) + first)" if form.is_bytes else f"{low} | {high}"
        lines.append(f"        const int8x4s n{v} = {quantized};")
        lines.append(f"        upper{v} >>= {count};")
    return lines


def _floats(rows: int, form: GroupForm) -> list[str]:
    lines = []
    for code in range(8):
        shift = f" >> {4 * code}" if code else ""
        numbers = [f"group_floats(table, w{v}{shift})" for v in range(form.vectors)]
        lines += ["      {", *_products(rows, code // 2 + 4 * (code % 2), numbers), "      }"]
    return lines


def _converted(rows: int, form: GroupForm) -> list[str]:
    lines = []
    for four in range(form.per // 4):
        lines += ["      {", *(_joined(form, four) if form.upper else [])]
        for code in range(4):
            shift = f" >> {8 * code}" if code else ""
            int8x4s = [f"({'n' if form.upper else 'w'}{v}{shift})" for v in range(form.vectors)]
            less = "" if form.has_first else " - 128"
            numbers = [f"__builtin_convertvector(({int8x4} & 255){less}, floats)" for int8x4 in int8x4s]
            lines += ["        {", *_products(rows, 4 * four + code, numbers), "        }"]
        lines.append("      }")
    return lines


def _products(rows: int, element: int, numbers: list[str]) -> list[str]:
    lines = [f"        const float x{i} = *(const float *)({_row(i, 4 * element)});" for i in range(rows)]
    for v, number in enumerate(numbers):
        lines.append(f"        const floats t{v} = {number};")
        lines += [f"        p{i}_{v} += t{v} * x{i};" for i in range(rows)]
    return lines


def _numbers(rows: int, form: GroupForm) -> list[str]:
    lines = []
    for four in range(form.per // 4):
        names = [f"n{v}" if form.upper else f"w{v}" for v in range(form.vectors)]
        lines += ["      {", *(_joined(form, four) if form.upper else []), *_dots(rows, four, names), "      }"]
    return lines


def _bytes(rows: int, form: GroupForm) -> list[str]:
    lines = []
    for four in range(2):
        shifts = [f"w{v} >> 4" if four else f"w{v}" for v in range(form.vectors)]
        tables = [
            f"        const int8x4s t{v} = group_bytes(numbers, ({s}) & 0x0f0f0f0f);" for v, s in enumerate(shifts)
        ]
        lines += ["      {", *tables, *_dots(rows, four, [f"t{v}" for v in range(form.vectors)]), "      }"]
    return lines


def _dots(rows: int, four: int, numbers: list[str]) -> list[str]:
    lines = ["        int32_t int8x4;"]
    for i in range(rows):
        lines.append(f"        memcpy(&int8x4, {_row(i, 4 * four)}, 4);")
        lines += [f"        GROUP_DOT(p{i}_{v}, {number}, int8x4);" for v, number in enumerate(numbers)]
    return lines
