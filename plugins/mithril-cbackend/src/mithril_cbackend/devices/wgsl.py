"""WGSL, the language of WebGPU: its prelude, and corrections of the text that TVM prints.

WGSL leaves the accuracy of its functions to drivers: sin may be wrong by 2**-11, asin by 7e-5. Those of the prelude are
accurate to some units in the last place on every driver. They avoid ``(x + c) - c``, which Mesa folds to ``x``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mithril_cbackend.devices.languages import Language

LARGEST_GRID = 65535  # workgroups of one dimension of a launch, the default limit of WebGPU
PRELUDE = """fn float32_from_int32(x: i32) -> f32 { return bitcast<f32>(x); }

fn float32_from_uint32(x: u32) -> f32 { return bitcast<f32>(x); }

fn int32_from_float32(x: f32) -> i32 { return bitcast<i32>(x); }

fn uint32_from_float32(x: f32) -> u32 { return bitcast<u32>(x); }

fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }

fn infinity(sign: u32) -> f32 { return bitcast<f32>(0x7f800000u | sign); }

fn quiet_nan(x: f32) -> f32 { return bitcast<f32>(bitcast<u32>(x) | 0x7fc00000u); }

fn float_from_half(x: u32) -> f32 {
  let sign = (x & 0x8000u) << 16u;
  let size = x & 0x7fffu;
  if (size < 0x400u) { return bitcast<f32>(sign | bitcast<u32>(f32(size) * 5.9604645e-8)); }
  if (size >= 0x7c00u) { return bitcast<f32>(sign | 0x7f800000u | ((size & 0x3ffu) << 13u)); }
  return bitcast<f32>(sign | ((size << 13u) + 0x38000000u));
}

fn half_from_float(x: f32) -> u32 {
  let word = bitcast<u32>(x);
  let sign = (word >> 16u) & 0x8000u;
  let size = word & 0x7fffffffu;
  if (size > 0x7f800000u) { return sign | 0x7e00u; }
  if (size >= 0x477ff000u) { return sign | 0x7c00u; }
  if (size < 0x38800000u) { return sign | u32(round(bitcast<f32>(size) * 16777216.0)); }
  return sign | ((size - 0x38000000u + 0xfffu + ((size >> 13u) & 1u)) >> 13u);
}

fn floorf(x: f32) -> f32 { return floor(x); }

fn ceilf(x: f32) -> f32 { return ceil(x); }

fn truncf(x: f32) -> f32 { return trunc(x); }

fn rintf(x: f32) -> f32 { return round(x); }

fn fabsf(x: f32) -> f32 { return abs(x); }

fn sqrtf(x: f32) -> f32 { return sqrt(x); }

fn copysignf(x: f32, y: f32) -> f32 {
  return bitcast<f32>((bitcast<u32>(x) & 0x7fffffffu) | (bitcast<u32>(y) & 0x80000000u));
}

fn fmodf(x: f32, y: f32) -> f32 {
  let size = bitcast<u32>(y) & 0x7fffffffu;
  var rest = abs(x);
  if (is_nan(x) || is_nan(y) || size == 0u || rest >= infinity(0u)) { return quiet_nan(x); }
  if (size == 0x7f800000u) { return x; }
  while (rest >= abs(y)) {  // each step subtracts a multiple of y exactly
    let shift = ((bitcast<u32>(rest) >> 23u) - (size >> 23u)) << 23u;
    let most = bitcast<f32>(size + shift);
    rest -= select(most, bitcast<f32>(size + shift - 0x800000u), most > rest);
  }
  return copysignf(rest, x);
}

fn exp_less_one(r: f32) -> f32 {  // for |r| <= log(2) / 2
  let p = (((1.3814467e-3 * r + 8.3687808e-3) * r + 4.1668393e-2) * r + 1.66665196e-1) * r + 4.99999940e-1;
  return p * (r * r) + r;
}

fn power_of_two(n: i32) -> f32 { return bitcast<f32>((n + 127) << 23u); }

fn expf(x: f32) -> f32 {
  if (is_nan(x)) { return x; }
  if (x > 88.7228394) { return infinity(0u); }
  if (x < -87.3365479) { return 0.0; }
  let n = round(x * 1.44269504);
  let y = exp_less_one(x - n * 0.693359375 - n * -2.12194440e-4) + 1.0;
  let half = i32(n) / 2;  // 2**128 is no float
  return y * power_of_two(half) * power_of_two(i32(n) - half);
}

fn expm1f(x: f32) -> f32 {
  if (abs(x) < 0.34) { return exp_less_one(x); }
  return expf(x) - 1.0;
}

fn log_of_mantissa(r: f32) -> f32 {  // log(1 + r) - r for r in [-0.3, 0.42]
  let z = r * r;
  var p = ((7.0376836292e-2 * r - 1.1514610310e-1) * r + 1.1676998740e-1) * r - 1.2420140846e-1;
  p = (((p * r + 1.4249322787e-1) * r - 1.6668057665e-1) * r + 2.0000714765e-1) * r - 2.4999993993e-1;
  return (p * r + 3.3333331174e-1) * r * z - z * 0.5;
}

fn exponent_and_rest(x: f32) -> vec2<f32> {  // e and r of x = 2**e (1 + r) for 0 < x < infinity
  let tiny = x < 1.17549435e-38;
  let word = bitcast<i32>(select(x, x * 8388608.0, tiny));
  let m = bitcast<f32>((word & 0x007fffff) | 0x3f000000);
  let low = m < 0.70710678;
  let e = (word >> 23u) - select(126, 149, tiny) - select(0, 1, low);
  return vec2<f32>(f32(e), select(m, m + m, low) - 1.0);
}

fn logf(x: f32) -> f32 {
  if (x == 0.0) { return infinity(0x80000000u); }
  if (is_nan(x) || x < 0.0) { return quiet_nan(x); }
  if (x >= infinity(0u)) { return x; }
  let parts = exponent_and_rest(x);
  return (log_of_mantissa(parts.y) + parts.x * -2.12194440e-4) + parts.y + parts.x * 0.693359375;
}

fn log1pf(x: f32) -> f32 {
  if (x > -0.29 && x < 0.41) { return x + log_of_mantissa(x); }
  return logf(1.0 + x);
}

fn powf(x: f32, y: f32) -> f32 {
  if (y == 0.0 || x == 1.0) { return 1.0; }
  if (is_nan(x) || is_nan(y)) { return quiet_nan(x); }
  let a = abs(x);
  let whole = trunc(y) == y;
  let odd = whole && abs(y) < 16777216.0 && (i32(y) & 1) == 1;
  let sign = select(0u, 0x80000000u, odd && (bitcast<u32>(x) >> 31u) == 1u);
  if (a == 0.0 || a >= infinity(0u)) { return select(bitcast<f32>(sign), infinity(sign), (a == 0.0) == (y < 0.0)); }
  if (abs(y) >= infinity(0u)) {
    if (a == 1.0) { return 1.0; }
    return select(0.0, infinity(0u), (a > 1.0) == (y > 0.0));
  }
  if (x < 0.0 && !whole) { return quiet_nan(x); }
  // 2**(y e) times exp(y log(1 + r)); products of parts with 12 bits are exact
  let parts = exponent_and_rest(a);
  let r = parts.y;
  let tail = log_of_mantissa(r);
  let y1 = bitcast<f32>(bitcast<u32>(y) & 0xfffff000u);
  let r1 = bitcast<f32>(bitcast<u32>(r) & 0xfffff000u);
  let n = round(y * parts.x + y * (r + tail) * 1.44269504);
  if (n > 130.0) { return infinity(sign); }
  if (n < -160.0) { return bitcast<f32>(sign); }
  let e = parts.x;
  let head = (y1 * e - n) + (y - y1) * e;  // exact: n is near y e where log(1 + r) is small
  let rest = y1 * r1 + (y1 * (r - r1) + ((y - y1) * r + y * tail));
  let result = expf(head * 0.693359375 + (head * -2.12194440e-4 + rest));
  let half = i32(n) / 2;
  return bitcast<f32>(bitcast<u32>(result * power_of_two(half) * power_of_two(i32(n) - half)) | sign);
}

fn tanhf(x: f32) -> f32 {
  if (is_nan(x) || abs(x) < 0.0004) { return x; }
  let c = clamp(x, -7.90531111, 7.90531111);
  let z = c * c;
  var p = ((-2.76076848e-16 * z + 2.00018790e-13) * z - 8.60467152e-11) * z + 5.12229709e-08;
  p = ((p * z + 1.48572236e-05) * z + 6.37261929e-04) * z + 4.89352456e-03;
  return c * p / (((1.19825839e-06 * z + 1.18534706e-04) * z + 2.26843463e-03) * z + 4.89352519e-03);
}

fn erff(x: f32) -> f32 {
  if (is_nan(x)) { return x; }
  let c = clamp(x, -4.0, 4.0);
  let z = c * c;
  var p = ((-2.72614226e-10 * z + 2.77068142e-08) * z - 2.10102402e-06) * z - 5.69250639e-05;
  p = ((p * z - 7.34990631e-04) * z - 2.95459980e-03) * z - 1.60960333e-02;
  let q = ((-1.45660718e-05 * z - 2.13374055e-04) * z - 1.68282697e-03) * z - 7.37332917e-03;
  return c * p / (q * z - 1.42647391e-02);
}

fn sinhf(x: f32) -> f32 {
  let a = abs(x);
  if (!(a >= 1.0)) {  // also nan
    let z = x * x;
    return x + x * z * ((2.03721912e-4 * z + 8.33028376e-3) * z + 1.66667160e-1);
  }
  let e = expf(0.5 * a);  // its square may be infinite, half of it not
  return copysignf(0.5 * e * e - 0.5 / e / e, x);
}

fn coshf(x: f32) -> f32 {
  if (is_nan(x)) { return x; }
  let e = expf(0.5 * abs(x));
  return 0.5 * e * e + 0.5 / e / e;
}

fn asinhf(x: f32) -> f32 {
  let a = abs(x);
  if (a > 1e9) { return copysignf(logf(a) + 0.693147181, x); }
  return copysignf(log1pf(a + a * a / (1.0 + sqrt(a * a + 1.0))), x);
}

fn acoshf(x: f32) -> f32 {
  if (is_nan(x) || x < 1.0) { return quiet_nan(x); }
  if (x > 1e9) { return logf(x) + 0.693147181; }
  let t = x - 1.0;
  return log1pf(t + sqrt(2.0 * t + t * t));
}

fn atanhf(x: f32) -> f32 {
  let a = abs(x);
  if (is_nan(x) || a > 1.0) { return quiet_nan(x); }
  if (a == 1.0) { return infinity(bitcast<u32>(x) & 0x80000000u); }
  return copysignf(0.5 * log1pf(2.0 * a / (1.0 - a)), x);
}

fn asinf(x: f32) -> f32 {
  let a = abs(x);
  if (is_nan(x) || a > 1.0) { return quiet_nan(x); }
  let far = a > 0.5;
  let z = select(a * a, 0.5 * (1.0 - a), far);
  let s = select(a, sqrt(z), far);
  let p = (((4.2163199048e-2 * z + 2.4181311049e-2) * z + 4.5470025998e-2) * z + 7.4953002686e-2) * z + 1.6666752422e-1;
  let y = p * z * s + s;
  return copysignf(select(y, 1.57079633 - 2.0 * y, far), x);
}

fn acosf(x: f32) -> f32 {
  if (x > 0.5) { return 2.0 * asinf(sqrt(0.5 * (1.0 - x))); }
  if (x < -0.5) { return 3.14159265 - 2.0 * asinf(sqrt(0.5 * (1.0 + x))); }
  return 1.57079633 - asinf(x);
}

fn atanf(x: f32) -> f32 {
  if (is_nan(x)) { return x; }
  let a = abs(x);
  var base = 0.0;
  var r = a;
  if (a > 2.414213562) {
    base = 1.57079633;
    r = -1.0 / a;
  } else if (a > 0.4142135624) {
    base = 0.785398163;
    r = (a - 1.0) / (a + 1.0);
  }
  let z = r * r;
  let p = ((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1;
  return copysignf(base + (p * z * r + r), x);
}

fn atan2f(y: f32, x: f32) -> f32 {
  if (is_nan(x) || is_nan(y)) { return quiet_nan(x); }
  let a = abs(x);
  let b = abs(y);
  let equal = a == b;  // also both infinite or zero
  var t = atanf(select(b / a, select(1.0, 0.0, b == 0.0), equal));
  if ((bitcast<u32>(x) >> 31u) == 1u) { t = 3.14159265 - t; }
  return copysignf(t, y);
}

fn reduced_angle(x: f32) -> vec2<f32> {  // r and n of x = r + n pi/2 for x >= 0; r is within pi/4
  if (x < 8000.0) {
    let n = round(x * 0.636619772);
    return vec2<f32>(((x - n * 1.5703125) - n * 4.83751297e-4) - n * 7.54978995e-8, n);
  }
  // Payne and Hanek: the mantissa times 64 bits of 2/pi, of which the first has the weight 2
  var digits = array<u32, 7>(0u, 0xa2f9836eu, 0x4e441529u, 0xfc2757d1u, 0xf534ddc0u, 0xdb629599u, 0x3c439041u);
  let word = bitcast<u32>(x);
  let m = (word & 0x7fffffu) | 0x800000u;
  let first = (word >> 23u) - 120u;
  let k = first >> 5u;
  let s = first & 31u;
  let w1 = (digits[k] << s) | select(digits[k + 1u] >> (32u - s), 0u, s == 0u);
  let w2 = (digits[k + 1u] << s) | select(digits[k + 2u] >> (32u - s), 0u, s == 0u);
  let middle = (m >> 16u) * (w2 & 0xffffu) + (((m & 0xffffu) * (w2 & 0xffffu)) >> 16u);
  let carry = ((m & 0xffffu) * (w2 >> 16u) + (middle & 0xffffu)) >> 16u;
  let high = m * w1 + (m >> 16u) * (w2 >> 16u) + (middle >> 16u) + carry;
  let n = (high + 0x20000000u) >> 30u;
  let rest = f32(bitcast<i32>(high - (n << 30u))) * 9.31322575e-10 + f32(m * w2) * 2.16840434e-19;
  return vec2<f32>(rest * 1.57079633, f32(n));
}

fn sine(x: f32, quarter: i32) -> f32 {  // of x + quarter pi/2 for x >= 0
  let parts = reduced_angle(x);
  let r = parts.x;
  let z = r * r;
  let n = i32(parts.y) + quarter;
  let sine = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * r + r;
  let cosine = ((2.443315711810e-5 * z - 1.388731625494e-3) * z + 4.166664568298e-2) * z * z - 0.5 * z + 1.0;
  let y = select(sine, cosine, (n & 1) == 1);
  return select(y, -y, (n & 2) == 2);
}

fn sinf(x: f32) -> f32 {
  if (is_nan(x) || abs(x) >= infinity(0u)) { return quiet_nan(x); }
  return select(sine(x, 0), -sine(-x, 0), (bitcast<u32>(x) >> 31u) == 1u);
}

fn cosf(x: f32) -> f32 {
  if (is_nan(x) || abs(x) >= infinity(0u)) { return quiet_nan(x); }
  return sine(abs(x), 1);
}

fn tanf(x: f32) -> f32 {
  return sinf(x) / cosf(x);
}
"""


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


# Words that WGSL reserves, and names of the functions that TVM or the prelude calls
RESERVED = frozenset(
    words("""
    alias break case const const_assert continue continuing default diagnostic discard else enable false fn for if
    let loop override requires return struct switch true var while NULL Self abstract active alignas alignof as asm
    asm_fragment async attribute auto await become cast catch class co_await co_return co_yield coherent column_major
    common compile compile_fragment concept const_cast consteval constexpr constinit crate debugger decltype delete
    demote demote_to_helper do dynamic_cast enum explicit export extends extern external fallthrough filter final
    finally friend from fxgroup get goto groupshared highp impl implements import inline instanceof interface layout
    lowp macro macro_rules match mediump meta mod module move mut mutable namespace new nil noexcept noinline
    nointerpolation non_coherent noncoherent noperspective null nullptr of operator package packoffset partition pass
    patch pixelfragment precise precision premerge priv protected pub public readonly ref regardless register
    reinterpret_cast require resource restrict self set shared sizeof smooth snorm static static_assert static_cast std
    subroutine super target template this thread_local throw trait try type typedef typeid typename typeof union unless
    unorm unsafe unsized use using varying virtual volatile wgsl where with writeonly yield
    array atomic bool f16 f32 i32 u32 vec2 vec3 vec4 bitcast select abs ceil clamp floor round sqrt trunc""")
)
FUNCTIONS = {part[len("fn ") : part.index("(")]: part for part in PRELUDE.split("\n\n")}


@dataclass(frozen=True)
class WGSL(Language):
    """WGSL, whose programs are single kernels."""

    def finished(self, text: str, groups: int) -> str:
        # The number of groups is known: without a uniform buffer for it.
        text = re.sub(r"struct PODArgs \{.*?podArgs : PODArgs;\n\n", "", text, flags=re.DOTALL)
        text = text.replace("podArgs.packGridDimX", f"{groups - 1}u")
        # The sign is an operator, its operand too large.
        text = text.replace("-2147483648i", "i32(-2147483648)")
        # TVM prints chains of named values in exponential time, so that names are arrays of one element until here.
        for name, kind in re.findall(r"^ *var (\w+) : array<(\w+), 1>;\n", text, re.MULTILINE):
            if len(re.findall(rf"^ *{name}\[0i\] = ", text, re.MULTILINE)) == 1:
                text = re.sub(rf"^ *var {name} : .*\n", "", text, flags=re.MULTILINE)
                text = re.sub(rf"^( *){name}\[0i\] = ", rf"\1let {name} : {kind} = ", text, flags=re.MULTILINE)
                text = re.sub(rf"\b{name}\[0i\]", name, text)
        return text

    def program(self, text: str) -> str:
        """Return a function with those of the prelude that it calls; drivers compile each program on its own."""
        needed = words(text)
        parts = []
        for name, part in reversed(FUNCTIONS.items()):  # functions call earlier ones
            if name in needed:
                needed |= words(part)
                parts.append(part)
        return "\n".join([*reversed(parts), text])

    def grid(self, groups: int) -> tuple[int, int, int]:
        """Return the dimensions of a launch; its kernel ignores further groups."""
        first = min(groups, LARGEST_GRID)
        return first, 1, -(-groups // first)


WEBGPU = WGSL("webgpu", narrows=True, selects=True, binds=False, tests_nan=True, reserved=RESERVED)
