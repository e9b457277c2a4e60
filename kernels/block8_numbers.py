"""Block8's numbers in Triton: rows of fp32 to bytes with a scale, and back. :mod:`.block8_kernels` has the formulas.

Bytes of floats are made by exact shifts, additions and multiplications, because Triton's casts to e4m3 need sm_89.
"""

import triton
import triton.language as tl

_SIGN = tl.constexpr(-(2**31))
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_MOST = tl.constexpr((127 + 127) << 23)  # 2^127
_LEAST = tl.constexpr((127 - 100) << 23)  # 2^-100
_ONE = tl.constexpr(127 << 23)
_2_TO_23 = tl.constexpr(float(2**23))
_BITS_OF_2_TO_23 = tl.constexpr((127 + 23) << 23)
_2_TO_23_AND_A_HALF = tl.constexpr(float(3 * 2**22))
_2_TO_MINUS_16 = tl.constexpr(2.0**-16)


# Not `@triton.jit`: under Triton 3.6 such a function returns a tensor, even for a constant.


@triton.constexpr_function
def _largest(NUMBER):
    return 127.0 if NUMBER == "int8" else (448.0 if NUMBER == "e4m3" else 57344.0)


@triton.constexpr_function
def _mantissa_bits(NUMBER):
    return 3 if NUMBER == "e4m3" else 2


@triton.constexpr_function
def _least_exponent(NUMBER):
    """The least exponent of normal numbers, as in the bits of fp32."""
    return 127 - 6 if NUMBER == "e4m3" else 127 - 14


@triton.jit
def _bits(values):
    return values.to(tl.int32, bitcast=True)


@triton.jit
def _from_bits(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _hash(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _draw(element, key):
    """A fraction of 16 bits for each element, uint32."""
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    random = _hash(_hash(element ^ low) + high) >> 16
    return random.to(tl.int32).to(tl.float32) * _2_TO_MINUS_16


@triton.jit
def _to_int8(x, element, key, STOCHASTIC: tl.constexpr):
    """Return bytes, as int32, and numbers, as fp32."""
    if STOCHASTIC:
        k = (tl.minimum(tl.abs(x), 127.0) + _draw(element, key)).to(tl.int32)
        byte = tl.where(x < 0.0, -k, k)
        return byte, byte.to(tl.float32)
    else:
        # A sum with 1.5 * 2^23 has no bits for a fraction. So x is rounded to nearest, and is in the lowest bits.
        rounded = x + _2_TO_23_AND_A_HALF
        return _bits(rounded), rounded - _2_TO_23_AND_A_HALF


@triton.jit
def _to_float8(x, element, key, NUMBER: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Return bytes, as int32, and numbers, as fp32: k times the distance of neighbours at x."""
    MANTISSA: tl.constexpr = _mantissa_bits(NUMBER)
    LEAST: tl.constexpr = _least_exponent(NUMBER)
    bits = _bits(x)
    magnitude = _from_bits(bits & _MAGNITUDE)
    exponent = tl.maximum((bits & _MAGNITUDE) >> 23, LEAST)
    distance = _from_bits((exponent - MANTISSA) << 23)
    inverse = _from_bits(((254 + MANTISSA) - exponent) << 23)
    if STOCHASTIC:
        k = (tl.minimum(magnitude, _largest(NUMBER)) * inverse + _draw(element, key)).to(tl.int32)
        steps = k.to(tl.float32)
    else:
        rounded = magnitude * inverse + _2_TO_23  # as in _to_int8
        k = _bits(rounded) - _BITS_OF_2_TO_23
        steps = rounded - _2_TO_23
    # Before the mantissa, a normal number has its exponent's distance from the least exponent, plus 1. k has one bit
    # more than the mantissa, which adds this 1. Without that bit the number is subnormal.
    byte = (((exponent - LEAST) << MANTISSA) + k) | ((bits >> 24) & 0x80)
    return byte, _from_bits(_bits(steps * distance) | (bits & _SIGN))


@triton.jit
def encoded(y, element, key, NUMBER: tl.constexpr, STOCHASTIC: tl.constexpr):
    """For each row return scale, bytes (uint8), values, and whether all of y is finite and not above 2^127."""
    # The bits of magnitudes, as integers, have the same order, and those of infinity and NaN come last.
    most = tl.max(_bits(y) & _MAGNITUDE, axis=1)
    is_finite = most <= _MOST
    usable = is_finite & (most >= _LEAST)
    m = _from_bits(tl.where(usable, most, _ONE))
    L: tl.constexpr = _largest(NUMBER)
    scale = tl.where(usable, tl.math.div_rn(m, L), tl.where(is_finite, 0.0, float("nan")))
    x = tl.where(usable[:, None], y, 0.0) * tl.math.div_rn(tl.full(m.shape, L, tl.float32), m)[:, None]
    if NUMBER == "int8":
        byte, number = _to_int8(x, element, key, STOCHASTIC)
    else:
        byte, number = _to_float8(x, element, key, NUMBER, STOCHASTIC)
    return scale, byte.to(tl.uint8), number * scale[:, None], is_finite


@triton.jit
def values(byte, scale, NUMBER: tl.constexpr):
    """The values of bytes, uint8, [rows, BLOCK], with the scales of their rows."""
    signed = byte.to(tl.int8, bitcast=True)
    if NUMBER == "int8":
        number = signed.to(tl.float32)
    else:
        # Shift exponent and mantissa to their places in fp32, with the sign far above. The number is then
        # 2^(127 - bias) times too small, also if it is subnormal.
        SHIFT: tl.constexpr = 23 - _mantissa_bits(NUMBER)
        LARGER: tl.constexpr = 2.0**120 if NUMBER == "e4m3" else 2.0**112
        number = _from_bits((signed.to(tl.int32) << SHIFT) & (_SIGN | (0x7F << SHIFT))) * LARGER
    return number * scale[:, None]
