"""Tile programs that CUDA kernels share: feature maps, products of tiles in shared memory, which tokens to walk.

Imports tilelang; import it inside a builder.

The compute type of a tile is the tensors' own for 16 bits; products accumulate in fp32. A float32 tile is used in two
parts of 11 bits each, high and low, and three tf32 products (all but low x low) keep 21 bits of each factor.
"""

import tilelang.language as T

from tl_kernels.spec import ELU1, RELU


def feature(x, feature_map):
    """phi(x), for a map known at run time; NaN stays NaN."""
    return T.if_then_else(
        feature_map == ELU1,
        T.if_then_else(x > T.float32(0), x + T.float32(1), T.exp(x)),
        T.if_then_else((feature_map == RELU) & (x < T.float32(0)), T.float32(0), x),
    )


def feature_slope(x, feature_map):
    """phi'(x), for a map known at run time."""
    return T.if_then_else(
        x > T.float32(0),
        T.float32(1),
        T.if_then_else(
            feature_map == ELU1, T.exp(x), T.if_then_else(feature_map == RELU, T.float32(0), T.float32(1))
        ),
    )


def high_part(x):
    """The part of a float32 that a tf32 product sees."""
    return T.reinterpret(T.reinterpret(x, "uint32") & T.uint32(0xFFFFE000), "float32")


def power_above(x):
    """A power of two above max(|x|, 1), and at most twice it."""
    return T.reinterpret(T.shift_left(_exponent(x) + T.uint32(1), T.uint32(23)), "float32")


def inverse_power_above(x):
    """1 / power_above(x)."""
    return T.reinterpret(T.shift_left(T.uint32(253) - _exponent(x), T.uint32(23)), "float32")


def _exponent(x):
    bits = T.reinterpret(T.max(T.abs(x), T.float32(1)), "uint32")
    return T.min(T.shift_right(bits, T.uint32(23)), T.uint32(252))


@T.macro
def split(high, low, x, rows, columns):
    """high + low = the float32 fragment x, each for tf32 products. high may be where x came from."""
    for i, j in T.Parallel(rows, columns):
        high[i, j] = high_part(x[i, j])
        low[i, j] = x[i, j] - high_part(x[i, j])


class Tile:
    """An operand of products in shared memory: one buffer, or for float32 its high and its low part.

    In float32, twin=False keeps one buffer, which holds one part after the other.
    """

    def __init__(self, rows, columns, dtype, twin=True):
        self.high = T.alloc_shared([rows, columns], dtype)
        self.low = T.alloc_shared([rows, columns], dtype) if dtype == "float32" and twin else None
        self.rows, self.columns, self.exact = rows, columns, dtype == "float32"


@T.macro
def fill(tile, x):
    """tile = the fragment x."""
    if tile.exact:
        split(tile.high, tile.low, x, tile.rows, tile.columns)
    else:
        T.copy(x, tile.high)


@T.macro
def multiply(acc, a, b, transpose_A=False, transpose_B=False):
    """acc += a b."""
    T.gemm(a.high, b.high, acc, transpose_A=transpose_A, transpose_B=transpose_B)
    if a.exact:
        T.gemm(a.low, b.high, acc, transpose_A=transpose_A, transpose_B=transpose_B)
        T.gemm(a.high, b.low, acc, transpose_A=transpose_A, transpose_B=transpose_B)


@T.macro
def multiply_state(acc, a, state, tile, transpose_B=False, filled=False):
    """acc += a state, where the fragment state goes through a tile of one buffer.

    filled: the tile holds the state already, from a product before; float32 needs both its parts again.
    """
    if a.exact:
        for i, j in T.Parallel(tile.rows, tile.columns):
            tile.high[i, j] = state[i, j] - high_part(state[i, j])
        T.gemm(a.high, tile.high, acc, transpose_B=transpose_B)
        for i, j in T.Parallel(tile.rows, tile.columns):
            tile.high[i, j] = high_part(state[i, j])
        T.gemm(a.high, tile.high, acc, transpose_B=transpose_B)
        T.gemm(a.low, tile.high, acc, transpose_B=transpose_B)
    else:
        if not filled:
            T.copy(state, tile.high)
        T.gemm(a.high, tile.high, acc, transpose_B=transpose_B)


@T.macro
def find_span(where, i, cu_seqlens, sequences, length, segment):
    """where = (sequence, first token, last + 1) of span i: sequences in pieces of `segment` tokens.

    Equal sequences (length > 0) have ceil(length / segment) spans each. Packed ones have theirs from slot
    cu_seqlens[n] // segment + n on, which are at least as many as they need and can be found without a table; a slot
    too many holds no token. A segment as long as any sequence makes span i sequence i.
    """
    if length > 0:
        where[0] = T.truncdiv(i, T.truncdiv(length + segment - 1, segment))
        where[1] = (i - where[0] * T.truncdiv(length + segment - 1, segment)) * segment
        where[2] = where[0] * length + T.min(where[1] + T.min(segment, length - where[1]), length)
        where[1] += where[0] * length
    if length <= 0:
        where[0] = 0
        where[1] = sequences
        for _ in T.serial(31):
            if where[1] - where[0] > 1:
                where[2] = T.shift_right(where[0] + where[1], 1)
                if T.truncdiv(cu_seqlens[where[2]], segment) + where[2] <= i:
                    where[0] = where[2]
                else:
                    where[1] = where[2]
        where[1] = cu_seqlens[where[0]] + (i - T.truncdiv(cu_seqlens[where[0]], segment) - where[0]) * segment
        where[2] = where[1] + T.max(T.min(segment, cu_seqlens[where[0] + 1] - where[1]), 0)
