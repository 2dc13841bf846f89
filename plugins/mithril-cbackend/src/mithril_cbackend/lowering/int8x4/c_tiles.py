"""Register tiles of int8x4 products as C: instructions of the CPU where the compiler has them, else plain vectors."""

from __future__ import annotations

import re

from mithril_cbackend.instructions import PAIRS
from mithril_cbackend.lowering.int8x4.llvm_tiles import ACCUMULATORS, Instructions

# The instruction itself, because gcc spills the sums around the intrinsic functions.
STEP_BYTES = """\
#ifndef STEP_U8S8
#if (defined(__x86_64__) && defined(__AVX512VNNI__) && LANES == 16) || (defined(__AVXVNNI__) && LANES == 8)
#if LANES == 16
#define STEP_U8S8(sum, int8x4, packed_block) \\
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"((int8x4) - (int8x4s){0}), "v"(packed_block))
#else
#define STEP_U8S8(sum, int8x4, packed_block) \\
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"((int8x4) - (int8x4s){0}), "x"(packed_block))
#endif
#elif defined(__ARM_FEATURE_SIMD32) && LANES == 1 /* of microcontrollers: bytes 0 and 2, bytes 1 and 3 */
static inline int32_t dot_int8x4(int32_t sum, int32_t int8x4, int32_t packed_block) {
  int32_t left, right;
  __asm__("uxtb16 %0, %1" : "=r"(left) : "r"(int8x4));
  __asm__("sxtb16 %0, %1" : "=r"(right) : "r"(packed_block));
  __asm__("smlad %0, %1, %2, %0" : "+r"(sum) : "r"(left), "r"(right));
  __asm__("uxtb16 %0, %1, ror #8" : "=r"(left) : "r"(int8x4));
  __asm__("sxtb16 %0, %1, ror #8" : "=r"(right) : "r"(packed_block));
  __asm__("smlad %0, %1, %2, %0" : "+r"(sum) : "r"(left), "r"(right));
  return sum;
}
#define STEP_U8S8(sum, int8x4, packed_block) (sum = dot_int8x4(sum, int8x4, packed_block))
#elif defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8) && LANES == 4
#include <arm_neon.h>
#define STEP_U8S8(sum, int8x4, packed_block) \\
  (sum = (int8x4s)vusdotq_s32((int32x4_t)(sum), (uint8x16_t)((int8x4) - (int8x4s){0}), (int8x16_t)(packed_block)))
#elif defined(__ARM_FEATURE_DOTPROD) && LANES == 4 /* signed bytes: subtract 128, and add it again as twice 64 */
#include <arm_neon.h>
#define DOT_S8S8(sum, a, b) ((int8x4s)vdotq_s32((int32x4_t)(sum), (int8x16_t)(a), (int8x16_t)(b)))
#define EVERY_INT8X4(x) ((int32_t)(x) - (int8x4s){0})
#define STEP_U8S8(sum, int8x4, packed_block) \\
  (sum = DOT_S8S8(DOT_S8S8(DOT_S8S8(sum, EVERY_INT8X4((uint32_t)(int8x4) ^ 0x80808080u), packed_block), \\
                           EVERY_INT8X4(0x40404040), packed_block), EVERY_INT8X4(0x40404040), packed_block))
#else
#define PART_U8S8(int8x4, packed_block, p) \\
  (((int8x4s)((unsigned_int8x4)(packed_block) << (24 - 8 * (p))) >> 24) * \\
   ((int32_t)((uint32_t)(int8x4) >> (8 * (p)) & 255) - (int8x4s){0}))
#define STEP_U8S8(sum, int8x4, packed_block) \\
  (sum += PART_U8S8(int8x4, packed_block, 0) + PART_U8S8(int8x4, packed_block, 1) + \\
          PART_U8S8(int8x4, packed_block, 2) + PART_U8S8(int8x4, packed_block, 3))
#endif
#endif
"""
STEP_PAIRS = """\
#ifndef STEP_BF16
#if defined(__x86_64__) && defined(__AVX512BF16__) && LANES == 16
#define STEP_BF16(sum, int8x4, packed_block) \\
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"((int8x4) - (int8x4s){0}), "v"(packed_block))
#else
#define STEP_BF16(sum, int8x4, packed_block) \\
  (sum += (floats)((packed_block) << 16) * float_of_uint32((uint32_t)(int8x4) << 16) + \\
          (floats)((packed_block) & -65536) * float_of_uint32((uint32_t)(int8x4) & 0xffff0000u))
#endif
#endif
"""
TYPES = """\
#ifndef INT8X4_TYPE
#define INT8X4_TYPE
#if defined(__GNUC__) && !defined(__clang__) /* no function of vectors is called from another file */
#pragma GCC diagnostic ignored "-Wpsabi"
#endif
typedef int32_t int8x4s __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t unsigned_int8x4 __attribute__((vector_size(LANES * 4)));
typedef float floats __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
#endif
"""


def tile(name: str, use: Instructions, rows: int, vectors: int) -> str:
    """Return the definition of the function that ``llvm_tiles.tile`` writes as LLVM IR."""
    lanes = use.lanes
    kind, step = ("floats", "STEP_BF16") if use.kind == PAIRS else ("int8x4s", "STEP_U8S8")
    cells = [(i, v) for i in range(rows) for v in range(vectors)]
    prefetches = lanes == 16 and 2 * len(cells) > ACCUMULATORS
    lines = [
        (TYPES if lanes > 1 else "") + (STEP_PAIRS if use.kind == PAIRS else STEP_BYTES),
        f"#ifndef {name.upper()}\n#define {name.upper()}\nstatic inline int32_t {name}(",
        "    const void *restrict a, int32_t stride, int32_t below, const void *restrict b, void *restrict c,",
        "    int32_t depth, const void *restrict offsets, int32_t runs, const void *ahead, int32_t pace) {",
        "  const int32_t *packed_block = b, *offset = offsets;",
        "  int32_t *sums = c;",
        f"  {kind} " + ", ".join(f"s{i}_{v} = {{0}}" for i, v in cells) + ";",
        *([] if prefetches else ["  (void)ahead;", "  (void)pace;"]),
        *(["  (void)below;"] if rows <= use.height else []),
        *(["  (void)stride;"] if min(rows, use.height) == 1 else []),
        "  for (int32_t r = 0; r < runs; ++r) {",
        "    const char *left = (const char *)a + offset[r];",
        f"    for (int32_t k = 0; k < depth; ++k, left += 4, packed_block += {vectors * lanes}) {{",
        "      int32_t int8x4;",
        *(["      __builtin_prefetch((const char *)ahead + (r * depth + k) * pace);"] if prefetches else []),
        *(f"      const int8x4s b{v} = *(const int8x4s *)(packed_block + {v * lanes});" for v in range(vectors)),
    ]
    for i in range(rows):
        block, row = divmod(i, use.height)
        place = [f"(int64_t){name} * {n}" for name, n in (("below", block), ("stride", row)) if n]
        lines.append(f"      memcpy(&int8x4, left + {' + '.join(place) or '0'}, 4);")
        lines += [f"      {step}(s{i}_{v}, int8x4, b{v});" for v in range(vectors)]
    lines += ["    }", "  }"]
    lines += [f"  *({kind} *)(sums + {(i * vectors + v) * lanes}) = s{i}_{v};" for i, v in cells]
    lines += ["  return 0;", "}", "#endif", ""]
    text = "\n".join(lines).replace("LANES", str(lanes))
    return text if lanes > 1 else re.sub(r"\bint8x4s\b", "int32_t", text.replace("unsigned_int8x4", "uint32_t"))
