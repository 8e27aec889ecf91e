"""Sort keys and hashes shared by the kernels, as device functions."""

import triton
import triton.language as tl


@triton.jit
def ordered_key(value, column):
    """int64 whose order is "larger value first, then lower column"; NaN counts as -inf.

    The high word is the float's bits made monotone, the low word counts columns down.
    """
    value = tl.where(value == value, value, float("-inf")) + 0.0  # -0.0 -> 0.0
    bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    high = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (high.to(tl.int64) << 32) | (0xFFFFFFFF - column.to(tl.int64))


@triton.jit
def key_value(key):
    """The float32 value of an :func:`ordered_key`."""
    high = (key >> 32).to(tl.int32)
    bits = high ^ ((high >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def key_column(key):
    """The column of an :func:`ordered_key`."""
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def _rotl(x, bits: tl.constexpr):
    return ((x << bits) | (x >> (32 - bits))) & 0xFFFFFFFF


@triton.jit
def _mix(h, block):
    k = (block * 0xCC9E2D51) & 0xFFFFFFFF
    k = (_rotl(k, 15) * 0x1B873593) & 0xFFFFFFFF
    return (_rotl(h ^ k, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF


@triton.jit
def gumbel(seed, position, column):
    """float64 -log(-log(u)) with u from MurmurHash3(seed, position, column), SGLang's blocks.

    u is the centre of the hash's cell of [0, 1), so every hash gives a finite value.
    """
    zero = column.to(tl.uint64) * 0
    seed = seed.to(tl.uint64)
    h = _mix(zero, zero + (seed & 0xFFFFFFFF))
    h = _mix(h, zero + (seed >> 32))
    h = _mix(h, zero + (position.to(tl.uint64) & 0xFFFFFFFF))
    h = _mix(h, column.to(tl.uint64) & 0xFFFFFFFF) ^ 16
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & 0xFFFFFFFF
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & 0xFFFFFFFF
    h ^= h >> 16
    uniform = (h.to(tl.int64).to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return -tl.log(-tl.log(uniform))
