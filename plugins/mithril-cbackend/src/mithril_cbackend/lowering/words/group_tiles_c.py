"""Tiles of products with codes as C: look-ups and dot products of the CPU where they exist, else plain loops."""

from __future__ import annotations

from mithril_cbackend.lowering.words.c_tiles import TYPES
from mithril_cbackend.lowering.words.group_tiles import COLUMNS, GroupForm

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
static inline floats group_codes(const void *from) {
  int8_t codes[LANES];
  floats result;
  memcpy(codes, from, sizeof codes);
  for (int j = 0; j < LANES; ++j) result[j] = (float)codes[j];
  return result;
}
#endif
"""
FLOATS = """\
#ifndef GROUP_FLOATS
#define GROUP_FLOATS
static inline floats group_floats(const float *table, words codes) {
  floats result;
#if defined(__x86_64__) && defined(__AVX512F__) && LANES == 16
  const floats numbers = *(const floats *)table;
  __asm__("vpermps %2, %1, %0" : "=v"(result) : "v"(codes), "v"(numbers));
#else
  for (int j = 0; j < LANES; ++j) result[j] = table[codes[j] & 15];
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
typedef words group_table;
static inline group_table group_bytes_table(const uint8_t *table) {
  uint8_t bytes[4 * LANES];
  words result;
  for (int j = 0; j < 4 * LANES; ++j) bytes[j] = table[j & 15];
  memcpy(&result, bytes, sizeof result);
  return result;
}
static inline words group_bytes(group_table table, words codes) {
  words result;
  __asm__("vpshufb %2, %1, %0" : "=v"(result) : "v"(table), "v"(codes));
  return result;
}
#define GROUP_ZERO 128
#if LANES == 16
#define GROUP_DOT(sum, numbers, word) \\
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(numbers), "v"((word) - (words){0}))
#else
#define GROUP_DOT(sum, numbers, word) \\
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(numbers), "x"((word) - (words){0}))
#endif
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD) && LANES == 4 /* signed bytes, 128 smaller */
#include <arm_neon.h>
#define GROUP_ZERO 0
typedef uint8x16_t group_table;
static inline group_table group_bytes_table(const uint8_t *table) { return vld1q_u8(table); }
static inline words group_bytes(group_table table, words codes) { return (words)vqtbl1q_u8(table, (uint8x16_t)codes); }
#define GROUP_DOT(sum, numbers, word) \\
  (sum = (words)vdotq_s32((int32x4_t)(sum), (int8x16_t)((numbers) ^ -0x7f7f7f80), (int8x16_t)((word) - (words){0})))
#else
#define GROUP_ZERO 128
typedef const uint8_t *group_table;
static inline group_table group_bytes_table(const uint8_t *table) { return table; }
static inline words group_bytes(group_table table, words codes) {
  uint8_t bytes[4 * LANES];
  words result;
  memcpy(bytes, &codes, sizeof bytes);
  for (int j = 0; j < 4 * LANES; ++j) bytes[j] = table[bytes[j]];
  memcpy(&result, bytes, sizeof result);
  return result;
}
#define GROUP_PART(numbers, word, p) \\
  (((numbers) >> (8 * (p)) & 255) * ((int8_t)((uint32_t)(word) >> (8 * (p))) - (words){0}))
#define GROUP_DOT(sum, numbers, word) \\
  (sum += GROUP_PART(numbers, word, 0) + GROUP_PART(numbers, word, 1) + GROUP_PART(numbers, word, 2) + \\
          GROUP_PART(numbers, word, 3))
#endif
#endif
"""


def tile(name: str, form: GroupForm, rows: int) -> str:
    """Return the definition of the function that ``group_tiles.tile`` writes as LLVM IR."""
    lanes, vectors = form.lanes, range(form.vectors)
    cells = [(i, v) for i in range(rows) for v in vectors]
    kind, part = ("words", "int32_t") if form.is_bytes else ("floats", "float")
    steps = f"left += {form.per * (1 if form.is_bytes else 4)}, codes += {4 * COLUMNS}"
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
        *(f"    words upper{v} = *(const words *)(head + {form.head + 4 * v * lanes});" for v in vectors if form.upper),
        f"    const char *codes = head + {form.head + form.upper};",
        f"    for (int32_t q = 0; q < {form.group // form.per}; ++q, {steps}) {{",
        *(f"      const words w{v} = *(const words *)(codes + {4 * lanes * v});" for v in vectors),
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
            value = f"__builtin_convertvector({value} - (words){{0}} - {total} * GROUP_ZERO, floats)"
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
        return f"group_codes(head + {start}) * group_halves(factors + {2 * (part * COLUMNS + v * form.lanes)})"
    return f"{'group_halves' if form.is_half else 'group_numbers'}(head + {start})"


def _joined(form: GroupForm, four: int) -> list[str]:
    """Return lines that set four codes of each column, or numbers plus 128, and that move the next upper bits."""
    lines, count = [], form.bits - 4
    for v in range(form.vectors):
        low = f"({f'w{v} >> 4' if four else f'w{v}'} & 0x0f0f0f0f)"
        high = f"(upper{v} << 4 & 0x{0x10101010 * ((1 << count) - 1):x})"
        codes = f"(words)((unsigned_words)({low} | {high}) + first)" if form.is_bytes else f"{low} | {high}"
        lines.append(f"        const words n{v} = {codes};")
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
            words = [f"({'n' if form.upper else 'w'}{v}{shift})" for v in range(form.vectors)]
            less = "" if form.has_first else " - 128"
            numbers = [f"__builtin_convertvector(({word} & 255){less}, floats)" for word in words]
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
        tables = [f"        const words t{v} = group_bytes(numbers, ({s}) & 0x0f0f0f0f);" for v, s in enumerate(shifts)]
        lines += ["      {", *tables, *_dots(rows, four, [f"t{v}" for v in range(form.vectors)]), "      }"]
    return lines


def _dots(rows: int, four: int, numbers: list[str]) -> list[str]:
    lines = ["        int32_t word;"]
    for i in range(rows):
        lines.append(f"        memcpy(&word, {_row(i, 4 * four)}, 4);")
        lines += [f"        GROUP_DOT(p{i}_{v}, {number}, word);" for v, number in enumerate(numbers)]
    return lines
