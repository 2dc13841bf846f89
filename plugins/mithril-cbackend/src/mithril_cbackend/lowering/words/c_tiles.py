"""Register tiles of word products as C: instructions of the CPU where the compiler has them, else plain vectors."""

from __future__ import annotations

import re

from mithril_cbackend.lowering.words.llvm_tiles import ACCUMULATORS, PAIRS, Instructions

# The instruction itself, because gcc spills the sums around the intrinsic functions.
STEP_BYTES = """\
#ifndef STEP_U8S8
#if (defined(__x86_64__) && defined(__AVX512VNNI__) && LANES == 16) || (defined(__AVXVNNI__) && LANES == 8)
#if LANES == 16
#define STEP_U8S8(sum, word, panel) \\
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"((word) - (words){0}), "v"(panel))
#else
#define STEP_U8S8(sum, word, panel) \\
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"((word) - (words){0}), "x"(panel))
#endif
#elif defined(__ARM_FEATURE_SIMD32) && LANES == 1 /* of microcontrollers: bytes 0 and 2, bytes 1 and 3 */
static inline int32_t dot_word(int32_t sum, int32_t word, int32_t panel) {
  int32_t left, right;
  __asm__("uxtb16 %0, %1" : "=r"(left) : "r"(word));
  __asm__("sxtb16 %0, %1" : "=r"(right) : "r"(panel));
  __asm__("smlad %0, %1, %2, %0" : "+r"(sum) : "r"(left), "r"(right));
  __asm__("uxtb16 %0, %1, ror #8" : "=r"(left) : "r"(word));
  __asm__("sxtb16 %0, %1, ror #8" : "=r"(right) : "r"(panel));
  __asm__("smlad %0, %1, %2, %0" : "+r"(sum) : "r"(left), "r"(right));
  return sum;
}
#define STEP_U8S8(sum, word, panel) (sum = dot_word(sum, word, panel))
#elif defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8) && LANES == 4
#include <arm_neon.h>
#define STEP_U8S8(sum, word, panel) \\
  (sum = (words)vusdotq_s32((int32x4_t)(sum), (uint8x16_t)((word) - (words){0}), (int8x16_t)(panel)))
#elif defined(__ARM_FEATURE_DOTPROD) && LANES == 4 /* signed bytes: subtract 128, and add it again as twice 64 */
#include <arm_neon.h>
#define DOT_S8S8(sum, a, b) ((words)vdotq_s32((int32x4_t)(sum), (int8x16_t)(a), (int8x16_t)(b)))
#define EVERY_WORD(x) ((int32_t)(x) - (words){0})
#define STEP_U8S8(sum, word, panel) \\
  (sum = DOT_S8S8(DOT_S8S8(DOT_S8S8(sum, EVERY_WORD((uint32_t)(word) ^ 0x80808080u), panel), \\
                           EVERY_WORD(0x40404040), panel), EVERY_WORD(0x40404040), panel))
#else
#define PART_U8S8(word, panel, p) \\
  (((words)((unsigned_words)(panel) << (24 - 8 * (p))) >> 24) * \\
   ((int32_t)((uint32_t)(word) >> (8 * (p)) & 255) - (words){0}))
#define STEP_U8S8(sum, word, panel) \\
  (sum += PART_U8S8(word, panel, 0) + PART_U8S8(word, panel, 1) + PART_U8S8(word, panel, 2) + \\
          PART_U8S8(word, panel, 3))
#endif
#endif
"""
STEP_PAIRS = """\
#ifndef STEP_BF16
#if defined(__x86_64__) && defined(__AVX512BF16__) && LANES == 16
#define STEP_BF16(sum, word, panel) \\
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"((word) - (words){0}), "v"(panel))
#else
#define STEP_BF16(sum, word, panel) \\
  (sum += (floats)((panel) << 16) * float_of_uint32((uint32_t)(word) << 16) + \\
          (floats)((panel) & -65536) * float_of_uint32((uint32_t)(word) & 0xffff0000u))
#endif
#endif
"""
TYPES = """\
#ifndef WORDS_TYPE
#define WORDS_TYPE
#if defined(__GNUC__) && !defined(__clang__) /* no function of vectors is called from another file */
#pragma GCC diagnostic ignored "-Wpsabi"
#endif
typedef int32_t words __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t unsigned_words __attribute__((vector_size(LANES * 4)));
typedef float floats __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
#endif
"""


def tile(name: str, use: Instructions, rows: int, vectors: int) -> str:
    """Return the definition of the function that ``llvm_tiles.tile`` writes as LLVM IR."""
    lanes = use.lanes
    kind, step = ("floats", "STEP_BF16") if use.kind == PAIRS else ("words", "STEP_U8S8")
    cells = [(i, v) for i in range(rows) for v in range(vectors)]
    prefetches = lanes == 16 and 2 * len(cells) > ACCUMULATORS
    lines = [
        (TYPES if lanes > 1 else "") + (STEP_PAIRS if use.kind == PAIRS else STEP_BYTES),
        f"#ifndef {name.upper()}\n#define {name.upper()}\nstatic inline int32_t {name}(",
        "    const void *restrict a, int32_t stride, int32_t below, const void *restrict b, void *restrict c,",
        "    int32_t depth, const void *restrict offsets, int32_t runs, const void *ahead, int32_t pace) {",
        "  const int32_t *panel = b, *offset = offsets;",
        "  int32_t *sums = c;",
        f"  {kind} " + ", ".join(f"s{i}_{v} = {{0}}" for i, v in cells) + ";",
        *([] if prefetches else ["  (void)ahead;", "  (void)pace;"]),
        *(["  (void)below;"] if rows <= use.height else []),
        *(["  (void)stride;"] if min(rows, use.height) == 1 else []),
        "  for (int32_t r = 0; r < runs; ++r) {",
        "    const char *left = (const char *)a + offset[r];",
        f"    for (int32_t k = 0; k < depth; ++k, left += 4, panel += {vectors * lanes}) {{",
        "      int32_t word;",
        *(["      __builtin_prefetch((const char *)ahead + (r * depth + k) * pace);"] if prefetches else []),
        *(f"      const words b{v} = *(const words *)(panel + {v * lanes});" for v in range(vectors)),
    ]
    for i in range(rows):
        block, row = divmod(i, use.height)
        place = [f"(int64_t){name} * {n}" for name, n in (("below", block), ("stride", row)) if n]
        lines.append(f"      memcpy(&word, left + {' + '.join(place) or '0'}, 4);")
        lines += [f"      {step}(s{i}_{v}, word, b{v});" for v in range(vectors)]
    lines += ["    }", "  }"]
    lines += [f"  *({kind} *)(sums + {(i * vectors + v) * lanes}) = s{i}_{v};" for i, v in cells]
    lines += ["  return 0;", "}", "#endif", ""]
    text = "\n".join(lines).replace("LANES", str(lanes))
    return text if lanes > 1 else re.sub(r"\bwords\b", "int32_t", text.replace("unsigned_words", "uint32_t"))
