"""Tile programs that CUDA kernels share: feature maps, products of tiles in shared memory, which tokens to walk.

Imports tilelang; import it inside a builder.

The compute type of a tile is the tensors' own for 16 bits; products accumulate in fp32. A float32 tile is used in two
parts of 11 bits each, high and low, and three tf32 products (all but low x low) keep 21 bits of each factor.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import tilelang.language as T
from tilelang.language.eager.builder import Builder
from tilelang.layout import make_swizzled_layout
from tvm.script.ir_builder import IRBuilder

from tl_kernels.spec import ELU1, RELU


def feature(x, feature_map):
    """phi(x), for a map known at run time; NaN stays NaN. Without branches: lanes that part cost more than exp."""
    positive = x > T.float32(0)
    elu1 = T.Select(positive, x, T.float32(0)) + T.exp(T.Select(positive, T.float32(0), x))
    other = T.Select((feature_map == RELU) & (x < T.float32(0)), T.float32(0), x)
    return T.Select(feature_map == ELU1, elu1, other)


def feature_slope(x, feature_map):
    """phi'(x), for a map known at run time."""
    positive = x > T.float32(0)
    other = T.Select((feature_map == RELU) & T.Not(positive), T.float32(0), T.float32(1))
    return T.Select(feature_map == ELU1, T.exp(T.Select(positive, T.float32(0), x)), other)


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
    """high + low = the float32 fragment x, each for tf32 products. high may be where x came from.

    By way of a fragment: TileLang 0.1.15 does not make vectors of reinterpreted values, and stores of four bytes each
    have conflicts.
    """
    part = T.alloc_fragment([rows, columns], "float32")
    for i, j in T.Parallel(rows, columns):
        part[i, j] = high_part(x[i, j])
    T.copy(part, high)
    for i, j in T.Parallel(rows, columns):
        part[i, j] = x[i, j] - high_part(x[i, j])
    T.copy(part, low)


_NUMBERS: "WeakKeyDictionary[Any, count[int]]" = WeakKeyDictionary()  # of buffers, by the program that they are in


def alloc_shared(shape: Sequence[int], dtype: str) -> Any:
    """T.alloc_shared with a name of its own, for what is kept in an attribute, which gives no name.

    TileLang 0.1.15 lays out buffers of one size and one name in an order that changes from run to run: so would their
    addresses, and with them the registers of a kernel.
    """
    buffer = T.alloc_shared(shape, dtype)
    IRBuilder.name(f"shared_{next(_NUMBERS.setdefault(Builder.current(), count())):03d}", buffer)
    return buffer


class Tile:
    """An operand of products in shared memory: one buffer, or for float32 its high and its low part.

    In float32, twin=False keeps one buffer, which holds one part after the other.
    """

    def __init__(self, rows, columns, dtype, twin=True):
        self.high = alloc_shared([rows, columns], dtype)
        self.low = alloc_shared([rows, columns], dtype) if dtype == "float32" and twin else None
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
def multiply_kept(acc, a, tile):
    """acc += a b^T, where the tile of one buffer holds b as it was loaded; in float32 b is lost.

    By way of fragments as in split.
    """
    if a.exact:
        b = T.alloc_fragment([tile.rows, tile.columns], "float32")
        part = T.alloc_fragment([tile.rows, tile.columns], "float32")
        T.copy(tile.high, b)
        for i, j in T.Parallel(tile.rows, tile.columns):
            part[i, j] = high_part(b[i, j])
        T.copy(part, tile.high)
        T.gemm(a.high, tile.high, acc, transpose_B=True)
        T.gemm(a.low, tile.high, acc, transpose_B=True)
        for i, j in T.Parallel(tile.rows, tile.columns):
            part[i, j] = b[i, j] - high_part(b[i, j])
        T.copy(part, tile.high)
        T.gemm(a.high, tile.high, acc, transpose_B=True)
    else:
        T.gemm(a.high, tile.high, acc, transpose_B=True)


@T.macro
def times_tile(product, x, tile):
    """product = the fragment x times a tile, element by element, with the tile as products see it."""
    for i, j in T.Parallel(tile.rows, tile.columns):
        if tile.low is None:
            product[i, j] = x[i, j] * T.cast(tile.high[i, j], "float32")
        else:
            product[i, j] = x[i, j] * (tile.high[i, j] + tile.low[i, j])


@T.macro
def inner_product(total, x, tile):
    """total[0] = the sum of a fragment times a tile.

    By way of shared memory: TileLang 0.1.15 does not reduce what a reduction has left with wgmma.
    """
    products = T.alloc_fragment([tile.rows, tile.columns], "float32")
    sums = T.alloc_fragment([tile.rows], "float32")
    passed = T.alloc_shared([tile.rows], "float32")
    every = T.alloc_fragment([tile.rows], "float32")
    times_tile(products, x, tile)
    T.reduce_sum(products, sums, dim=1)
    T.copy(sums, passed)
    T.copy(passed, every)
    T.reduce_sum(every, total, dim=0)


class Ahead:
    """Rows of a tensor [tokens, heads, width], copied into shared memory while the chunk before them is worked on.

    ahead=False: there is no buffer, and they are loaded when they are needed. swizzled: they are read as a product's
    accumulator lies, not in whole rows.
    """

    def __init__(self, rows, columns, dtype, ahead, swizzled=False):
        self.raw = alloc_shared([rows, columns], dtype) if ahead else None
        if ahead and swizzled:
            T.annotate_layout({self.raw: make_swizzled_layout(self.raw)})
        self.rows, self.columns, self.ahead = rows, columns, ahead


@T.macro
def fetch(tile, x, t, head, column):
    """Begin to copy rows from t on, columns from column on; what lies outside the tensor becomes zero."""
    if tile.ahead:
        T.async_copy(x[t : t + tile.rows, head, column : column + tile.columns], tile.raw)


@T.macro
def fetch_column(raw, x, t, rows, head):
    """Begin to copy x [tokens, heads] of a head and of the tokens from t on into shared memory."""
    T.async_copy(x[t : t + rows, head], raw)


@T.macro
def await_fetched(ahead):
    """All that was fetched is there, for all threads."""
    if ahead:
        T.ptx_wait_group(0)
        T.sync_threads()


@T.macro
def load(fragment, tile, x, t, head, column):
    """fragment = rows from t on, columns from column on, of x; or what was fetched of them."""
    if tile.ahead:
        T.copy(tile.raw, fragment)
    else:
        T.copy(x[t : t + tile.rows, head, column : column + tile.columns], fragment)


@T.macro
def store(x, tile, t, last, head, column, width):
    """Rows of x from t up to `last`, and columns from `column` on up to `width` = a tile in shared memory."""
    for i, d in T.Parallel(tile.shape[0], tile.shape[1]):
        if (t + i < last) & (column + d < width):
            x[t + i, head, column + d] = tile[i, d]


@T.macro
def mapped(x, rows, columns, left, width, feature_map, scale):
    """x = phi(x) scale; zero from row `left` on, which are of other sequences, and from column `width` on, padding."""
    for i, d in T.Parallel(rows, columns):
        x[i, d] = feature(x[i, d], feature_map) * scale
    if (left < rows) | (width < columns):  # rare, and nvcc makes a branch an element of a selected exp
        for i, d in T.Parallel(rows, columns):
            x[i, d] = T.Select((i < left) & (d < width), x[i, d], T.float32(0))


@T.macro
def through_map(dx, dy_s, x, feature_map):
    """dx = dy phi'(x): fragments of the tensors' type that lie alike, for stores of 16 bytes; dy in shared memory."""
    T.copy(dy_s, dx)
    for i, d in T.Parallel(dx.shape[0], dx.shape[1]):
        slope = feature_slope(T.cast(x[i, d], "float32"), feature_map)
        dx[i, d] = T.cast(T.cast(dx[i, d], "float32") * slope, dx.dtype)


@T.macro
def cleared(x, rows, columns, left):
    """x = 0 from row `left` on: 0 times a neighbour's NaN would be NaN."""
    if left < rows:
        for i, j in T.Parallel(rows, columns):
            x[i, j] = T.Select(i < left, x[i, j], T.float32(0))


@T.macro
def load_column(x_f, x, t, last, rows, head, given, otherwise):
    """x_f = x of a head and of the tokens from t on; `otherwise` from `last` on, and for all unless `given`."""
    for i in T.Parallel(rows):
        x_f[i] = T.if_then_else(given & (t + i < last), x[t + i, head], otherwise)


@T.macro
def add_rows(z, tile):
    """z += the sum of the rows of a tile."""
    for d in T.Parallel(tile.columns):
        for i in T.serial(tile.rows):
            z[d] += T.cast(tile.high[i, d], "float32")
            if tile.exact:
                z[d] += tile.low[i, d]


@T.macro
def take_state(S, rows, columns, kv, given, slot, head, corner):
    """S = rows and columns, from a corner (its row and its column) on, of the state in a slot, or zeros if not given.

    given is a condition: a parameter of the kernel by itself would take the macro's name for it (TileLang 0.1.15).
    """
    T.clear(S)
    if given:
        T.copy(kv[slot, head, corner[0] : corner[0] + rows, corner[1] : corner[1] + columns], S)


WITHOUT_TMA = {"disable_tma": True}  # of a tensor that may be empty: it has no descriptor


@T.macro
def keep_state(states, slot, head, corner, S, tile):
    """Rows and columns of the state in a slot, from a corner (its row and its column) on = S, which went by the tile.

    16 bits go from where S lies in rows, for stores of 16 bytes.
    """
    if tile.exact:
        T.copy(S, states[slot, head, corner[0] : corner[0] + tile.rows, corner[1] : corner[1] + tile.columns])
    else:
        T.copy(
            tile.high,
            states[slot, head, corner[0] : corner[0] + tile.rows, corner[1] : corner[1] + tile.columns],
            annotations=WITHOUT_TMA,
        )


@T.macro
def start_state(S, z, rows, columns, kv, zs, given, slot, heads, corner, K):
    """As take_state, with z of the rows beside S.

    heads: of the value and of z.
    """
    take_state(S, rows, columns, kv, given, slot, heads[0], corner)
    for d in T.Parallel(rows):
        z[d] = T.float32(0)
    if given:
        for d in T.Parallel(rows):
            if corner[0] + d < K:
                z[d] = zs[slot, heads[1], corner[0] + d]


@T.macro
def find_place(place, i, blocks, heads):
    """place = (span, value head, q/k head) of program i, whose block is i % blocks. heads: (HV, H).

    Blocks come first, then heads: programs that read the same rows, those of a q/k head's value heads among them, run
    at the same time, and all but the first find them in the L2 cache. In variables: TileLang 0.1.15 would divide again
    wherever one of them is used, in 64 bits.
    """
    place[0] = T.truncdiv(i // blocks, heads[0])
    place[1] = i // blocks - place[0] * heads[0]
    place[2] = T.truncdiv(place[1], T.truncdiv(heads[0], heads[1]))


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


@T.macro
def find_slots(where, n, cu_seqlens, length, segment):
    """where = (the first slot of sequence n, how many spans it has), as find_span has them."""
    where[1] = T.truncdiv(length + segment - 1, segment)
    where[0] = n * where[1]
    if length <= 0:
        where[0] = T.truncdiv(cu_seqlens[n], segment) + n
        where[1] = T.truncdiv(cu_seqlens[n + 1] - cu_seqlens[n] + segment - 1, segment)


@T.macro
def find_chunk(slot, where, cu_seqlens, length, rows):
    """slot[0] = where the first chunk of a span lies among all chunks of `rows` tokens, numbered as spans are.

    where: of the span, which begins with a chunk of its sequence.
    """
    if length > 0:
        slot[0] = where[0] * T.truncdiv(length + rows - 1, rows) + T.truncdiv(where[1] - where[0] * length, rows)
    if length <= 0:
        slot[0] = T.truncdiv(cu_seqlens[where[0]], rows) + where[0]
        slot[0] += T.truncdiv(where[1] - cu_seqlens[where[0]], rows)


def pool_word(slots, use_slots, i):
    """The first word of slot i: i itself (use_slots 0), int32 slots[i] (1), or int64 slots seen as pairs of int32 (2).

    Read it into a variable of its own before pool_row, which uses it more than once.
    """
    return T.if_then_else(use_slots > 0, slots[i * use_slots], i)


def pool_row(word, slots, use_slots, i, pool):
    """The row that slot i names: negative where there is none, -1 for padding.

    An int64 fits if its high word repeats the low one's sign.
    """
    sign = T.shift_right(word, 31)
    high = T.if_then_else(use_slots > 1, slots[i * 2 + 1], sign)
    return T.if_then_else((high == sign) & (word < pool), word, -2)


def unnamed(row):
    """What a step writes where no row is named: 0 for padding, NaN for a slot outside of the pool."""
    return T.if_then_else(row == -1, T.float32(0), T.reinterpret(T.uint32(0x7FC00000), "float32"))


LEAST_GATE = -128.0  # a stronger one is as strong: exp of it is 0 in fp32, and of it plus any others
RUN = 8  # tokens that are summed one after the other


class Gates:
    """Gates of a chunk, and their running sums in two parts.

    Decays are exponentials of differences of sums. The sum is kept in two floats, so that a difference is as good as
    the sum of the gates between: one float of a sum of strong gates has forgotten the weak ones.
    """

    def __init__(self, rows):
        self.raw = alloc_shared([rows], "float32")  # fetched a chunk ahead
        self.g = alloc_shared([rows], "float32")
        self.high = alloc_shared([rows], "float32")
        self.low = alloc_shared([rows], "float32")
        self.factors = alloc_shared([rows], "float32")  # for scale_tile
        self.rows = rows

    def between(self, j, i):
        """The sum of the gates behind token j up to token i."""
        return (self.high[i] - self.high[j]) + (self.low[i] - self.low[j])

    def decay(self, j, i):
        """exp of it for j <= i, else 1, whose place a mask takes: of the exponent, not of the result."""
        return T.exp(T.Select(j <= i, self.between(j, i), T.float32(0)))

    def first(self, i):
        """What the state before the chunk keeps up to token i."""
        return T.exp(self.high[i] + self.low[i])

    def last(self, j):
        """What token j keeps up to the end of the chunk."""
        return T.exp(self.between(j, self.rows - 1))

    @property
    def whole(self):
        """What the state before the chunk keeps up to its end."""
        return self.first(self.rows - 1)


@T.macro
def add_exactly(total, i, x, y):
    """total.high[i] + total.low[i] += x + y, where y is small: Knuth's two-sum keeps what an addition rounds off.

    By way of variables: TVM takes (a + b) - a for b.
    """
    total.sum[i] = total.high[i] + x
    total.back[i] = total.sum[i] - total.high[i]
    total.low[i] += (total.high[i] - (total.sum[i] - total.back[i])) + (x - total.back[i]) + y
    total.high[i] = total.sum[i]


class Total:
    """A sum in two floats, for each of some rows."""

    def __init__(self, rows):
        self.high, self.low, self.sum, self.back = (T.alloc_fragment([rows], "float32") for _ in range(4))


@T.macro
def sum_gates(gates, left):
    """Running sums of the gates that were fetched: first inside runs, then over the runs before.

    Gates from row `left` on are of other sequences and count as 0.
    """
    total = Total(gates.rows)
    for i in T.Parallel(gates.rows):
        least = T.Select(gates.raw[i] < T.float32(LEAST_GATE), T.float32(LEAST_GATE), gates.raw[i])  # NaN stays NaN
        gates.g[i] = T.Select(i < left, least, T.float32(0))
    for i in T.Parallel(gates.rows):
        total.high[i] = T.float32(0)
        total.low[i] = T.float32(0)
        for j in T.serial(RUN):
            add_exactly(total, i, T.Select(j <= i % RUN, gates.g[i - i % RUN + j], T.float32(0)), T.float32(0))
    T.copy(total.high, gates.high)
    T.copy(total.low, gates.low)
    for i in T.Parallel(gates.rows):
        for n in T.serial(gates.rows // RUN - 1):
            before, end = n < i // RUN, n * RUN + RUN - 1
            add_exactly(
                total,
                i,
                T.Select(before, gates.high[end], T.float32(0)),
                T.Select(before, gates.low[end], T.float32(0)),
            )
    T.copy(total.high, gates.high)
    T.copy(total.low, gates.low)


@T.macro
def scale_tile(tile, x_f, factors):
    """Rows of a tile times factors in shared memory; x_f is a fragment for it to pass through."""
    for i, j in T.Parallel(tile.rows, tile.columns):
        if tile.exact:
            x_f[i, j] = (tile.high[i, j] + tile.low[i, j]) * factors[i]
        else:
            x_f[i, j] = T.cast(tile.high[i, j], "float32") * factors[i]
    fill(tile, x_f)
