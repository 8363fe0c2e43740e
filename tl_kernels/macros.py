"""Tile programs that CPU kernels share: number formats, feature maps, loads, the register tile.

Imports tilelang; import it inside a builder.

Feature maps, phi(x) and its derivative:

    elu1      x + 1 for x > 0, exp(x) otherwise        1 for x > 0, exp(x) otherwise
    relu      max(x, 0)                                 1 for x > 0, 0 otherwise
    identity  x                                         1
"""

import tilelang.language as T
from tvm.script.ir_builder import tirx

from tl_kernels.spec import ELU1, IDENTITY, RELU

# ---- number formats: 16-bit floats travel as uint16; rows of them are converted on the way in and out


def storage(dtype):
    """The buffer dtype that holds dtype in a kernel's signature."""
    return "float32" if dtype == "float32" else "uint16"


def _load_bfloat16(h):
    return T.reinterpret(T.shift_left(T.cast(h, "uint32"), T.uint32(16)), "float32")


def _store_bfloat16(x):
    """Round to nearest even; a NaN stays a NaN (rounding up could carry it into the sign)."""
    u = T.reinterpret(x, "uint32")
    rounded = u + T.uint32(0x7FFF) + (T.shift_right(u, T.uint32(16)) & T.uint32(1))
    nan = (u & T.uint32(0x7FFFFFFF)) > T.uint32(0x7F800000)
    return T.cast(T.shift_right(T.if_then_else(nan, u | T.uint32(0x400000), rounded), T.uint32(16)), "uint16")


def row_format(dtype):
    """(load_row, store_row) of a dtype: macros (dst, at, src, from, width) that convert a run of elements."""
    if dtype == "float16":
        return _load_half_row, _store_half_row
    if dtype == "bfloat16":
        return _row_macro(_load_bfloat16), _row_macro(_store_bfloat16)
    return _row_macro(lambda x: x), _row_macro(lambda x: x)


def _row_macro(convert):
    @T.macro
    def copy_row(dst, i, src, j, width):
        for d in T.serial(width):
            dst[i + d] = convert(src[j + d])

    return copy_row


@T.macro
def _load_half_row(dst, i, src, j, width):
    T.evaluate(T.call_extern("int32", "tile_load_half", T.address_of(dst[i]), T.address_of(src[j]), width))


@T.macro
def _store_half_row(dst, i, src, j, width):
    T.evaluate(T.call_extern("int32", "tile_store_half", T.address_of(dst[i]), T.address_of(src[j]), width))


# ---- feature maps

EXP_LOWEST = -87.0  # exp below this is subnormal, and arithmetic on subnormals is 50 times slower


def exp(x):
    """exp(x) = 2^n exp(r) with |r| <= ln(2) / 2 and a degree 6 polynomial: 6 ulp for x in [-87, 0].

    libm's expf is not vectorised without -ffast-math. Below EXP_LOWEST the result is 0.
    """
    n = T.floor(x * T.float32(1.4426950408889634) + T.float32(0.5))
    r = x - n * T.float32(0.6931471805599453)  # in two parts would be closer, but -fassociative-math joins them
    poly = T.float32(1 / 720)
    for coefficient in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        poly = poly * r + T.float32(coefficient)
    power = T.reinterpret(T.shift_left(T.cast(n, "int32") + 127, 23), "float32")
    return T.if_then_else(x < T.float32(EXP_LOWEST), T.float32(0), poly * power)


def elu1(x):
    return T.if_then_else(x > T.float32(0), x + T.float32(1), exp(x))


def relu(x):
    return T.if_then_else(x < T.float32(0), T.float32(0), x)  # in this order NaN stays NaN


def elu1_slope(x):
    return T.if_then_else(x > T.float32(0), T.float32(1), exp(x))


def relu_slope(x):
    return T.if_then_else(x > T.float32(0), T.float32(1), T.float32(0))


# ---- tiles


def round_up(n, multiple):
    return (n + (multiple - 1)) // multiple * multiple


def named(var):
    """A kernel parameter to hand to a macro, which would otherwise rename it after its own parameter."""
    return tirx.meta_var(var)


class Rows:
    """Rows of a flat buffer in global memory: element (c, d) is buffer[base + c * stride + d].

    An object, because a macro renames every bare variable that it is given.
    """

    def __init__(self, buffer, stride, rows, width, base=0):
        self.buffer, self.stride, self.rows, self.width, self.base = buffer, stride, rows, width, base

    def at(self, c, d):
        return self.base + c * self.stride + d


@T.macro
def load_panels(dst, NR, src, C, load_row):
    """dst[panel, c, j] = src[c, panel * NR + j]; zero beyond the rows and the width. Full panels have a fixed trip."""
    for panel in T.serial((src.width + (NR - 1)) // NR):
        for c in T.serial(C):
            if c < src.rows:
                if (panel + 1) * NR <= src.width:
                    load_row(dst, (panel * C + c) * NR, src.buffer, src.at(c, panel * NR), NR)
                else:
                    load_row(dst, (panel * C + c) * NR, src.buffer, src.at(c, panel * NR), src.width - panel * NR)
                    for j in T.serial((panel + 1) * NR - src.width):
                        dst[(panel * C + c) * NR + src.width - panel * NR + j] = T.float32(0)
            else:
                for j in T.serial(NR):
                    dst[(panel * C + c) * NR + j] = T.float32(0)


@T.macro
def load_rows(dst, ld, src, C, load_row):
    """dst[c * ld + d] = src[c, d]; zero beyond the rows and the width, up to ld."""
    for c in T.serial(C):
        if c < src.rows:
            load_row(dst, c * ld, src.buffer, src.at(c, 0), named(src.width))
            for d in T.serial(ld - src.width):
                dst[c * ld + src.width + d] = T.float32(0)
        else:
            for d in T.serial(ld):
                dst[c * ld + d] = T.float32(0)


def prefetcher(dtype):
    """prefetch(src, c, rows, d, width): ask for a tile of src, so that it is near when its chunk comes.

    Called from inside the products of the chunk before: rows of [B, T, H, D] lie pages apart, which the hardware
    does not foresee, and asking for a whole chunk at once would only queue up.
    """
    name, size = f"tile_prefetch_{storage(dtype)}", 4 if dtype == "float32" else 2

    @T.macro
    def prefetch(src, c, rows, d, width):
        T.evaluate(
            T.call_extern(
                "int32", name, T.address_of(src.buffer[src.at(c, d)]), src.stride * size, rows, width * size
            )
        )

    return prefetch


@T.macro
def map_features(x, base, width, feature_map):
    """x = phi(x) in place for width elements from base. One loop a map: a select inside would not vectorise.

    Two ifs, not if and elif: TileLang 0.1.15 drops the first branch of an if whose else holds only an if.
    """
    if feature_map == ELU1:
        for d in T.serial(width):
            x[base + d] = elu1(x[base + d])
    if feature_map == RELU:
        for d in T.serial(width):
            x[base + d] = relu(x[base + d])


@T.macro
def load_features(dst, ld, src, C, load_row, feature_map):
    """As load_rows, through phi."""
    load_rows(dst, ld, src, C, load_row)
    for c in T.serial(src.rows):
        map_features(dst, c * ld, named(src.width), feature_map)


@T.macro
def load_feature_panels(dst, NR, src, C, load_row, feature_map):
    """As load_panels, through phi."""
    load_panels(dst, NR, src, C, load_row)
    for panel in T.serial((src.width + (NR - 1)) // NR):
        for c in T.serial(src.rows):
            map_features(dst, (panel * C + c) * NR, T.min(NR, src.width - panel * NR), feature_map)


@T.macro
def scale_rows(x, count, scale):
    for e in T.serial(count):
        x[e] *= scale


@T.macro
def normalize_rows(x, ld, inverse, C, eps):
    """In place x[c] -> x[c] inverse[c], inverse[c] = (the sum of the squares of row c + eps) ** -0.5."""
    for c in T.serial(C):
        inverse[c] = T.float32(0)
        for d in T.serial(ld):
            inverse[c] += x[c * ld + d] * x[c * ld + d]
        inverse[c] = T.float32(1) / T.sqrt(inverse[c] + T.float32(eps))
        for d in T.serial(ld):
            x[c * ld + d] *= inverse[c]


@T.macro
def norm_slopes(grad, x, inverse, dot, C, D):
    """The gradient through normalize_rows, in place: grad and x, the rows it gave, are [D, C]. dot is scratch."""
    for j in T.serial(C):
        dot[j] = T.float32(0)
    for d in T.serial(D):
        for j in T.serial(C):
            dot[j] += x[d * C + j] * grad[d * C + j]
    for d in T.serial(D):
        for j in T.serial(C):
            grad[d * C + j] = inverse[j] * (grad[d * C + j] - x[d * C + j] * dot[j])


@T.macro
def add_inner(total, lanes, x, x_at, x_ld, width, y, y_at, y_ld, rows):
    """total[0] += the sum of the products of two matrices [rows, width], in double but for 16 rows; lanes: scratch."""
    for block in T.serial(rows // 16):
        for j in T.serial(y_ld):
            lanes[j] = T.float32(0)
        for r in T.serial(16):
            for j in T.serial(width):
                lanes[j] += x[x_at + (block * 16 + r) * x_ld + j] * y[y_at + (block * 16 + r) * y_ld + j]
        for j in T.serial(y_ld):
            total[0] += T.cast(lanes[j], "float64")


@T.macro
def store_slopes(dst, grad, ld, x, slope, load_row, store_row, feature_map, scale):
    """dst[c, d] = scale phi'(x[c, d]) grad[c * ld + d]: the chain rule through the feature map. slope is scratch."""
    for c in T.serial(x.rows):
        load_row(slope, 0, x.buffer, x.at(c, 0), named(x.width))
        if feature_map == ELU1:
            for d in T.serial(x.width):
                slope[d] = elu1_slope(slope[d])
        if feature_map == RELU:
            for d in T.serial(x.width):
                slope[d] = relu_slope(slope[d])
        if feature_map == IDENTITY:
            for d in T.serial(x.width):
                slope[d] = T.float32(1)
        for d in T.serial(x.width):
            slope[d] *= grad[c * ld + d] * scale
        store_row(dst.buffer, dst.at(c, 0), slope, 0, named(x.width))


@T.macro
def invert(inv, dden, den, C, normalize):
    """inv[c] = 1 / den[c], or 1 without a normaliser and 0 beyond the rows; dden[c] = 0."""
    for c in T.serial(C):
        dden[c] = T.float32(0)
        inv[c] = T.float32(0)
        if c < den.rows:
            inv[c] = T.float32(1)
            if normalize > 0:
                inv[c] = T.float32(1) / den.buffer[den.at(c, 0)]


@T.macro
def normalize_grads(dn, ld, dden, inv, o, row, total, load_row, normalize):
    """In place dO -> dN = dO / den, and dden[c] -= dO . O / den: the normaliser's backward for one value head."""
    for c in T.serial(o.rows):
        if normalize > 0:
            load_row(row, 0, o.buffer, o.at(c, 0), named(o.width))
            total[0] = T.float32(0)
            for d in T.serial(o.width):
                total[0] += dn[c * ld + d] * row[d]
            dden[c] -= total[0] * inv[c]
            for d in T.serial(o.width):
                dn[c * ld + d] *= inv[c]


@T.macro
def load_gates(x, g, C):
    """x[c] = g[c]; 0 beyond the rows, so that a ragged chunk ends at its last token."""
    for c in T.serial(C):
        x[c] = T.float32(0)
        if c < g.rows:
            x[c] = g.buffer[g.at(c, 0)]


@T.macro
def gate_steps(step, g, C):
    """step[c] = exp(g[c]), the decay of each token."""
    load_gates(step, g, C)
    T.evaluate(T.call_extern("int32", "tile_exp", T.address_of(step[0]), C))


@T.macro
def decays(inside, first, last, step, g, C):
    """Products of exp(g_t): inside[i, j] over j < t <= i, 0 for j > i; first[i] over t <= i; last[j] over t > j.

    By products, and not by exponentials of sums: no difference of large sums loses a small gate. step is scratch.
    """
    load_gates(step, g, C)
    T.evaluate(
        T.call_extern(
            "int32", "tile_decays", T.address_of(inside[0]), T.address_of(first[0]), T.address_of(last[0]),
            T.address_of(step[0]), C,
        )
    )


@T.macro
def decays_if(inside, first, last, step, g, C, gated):
    """As decays; without gates all decays are 1."""
    if gated > 0:
        decays(inside, first, last, step, g, C)
    else:
        for i in T.serial(C):
            first[i] = T.float32(1)
            last[i] = T.float32(1)
            for j in T.serial(C):
                inside[i * C + j] = T.if_then_else(j <= i, T.float32(1), T.float32(0))


@T.macro
def substitute(dst, t, n, C, first):
    """Rows first ... first + MR of (I - n) dst = right, from the tile, which has all that earlier rows add to it.

    dst is a panel [C, NR], n [C, C], of which what is below the diagonal counts.
    """
    for e in T.serial(t.MR * t.NR):
        dst[first * t.NR + e] = t.acc[e]
    for i in T.serial(t.MR):
        for s in T.serial(i):
            for j in T.serial(t.NR):
                dst[(first + i) * t.NR + j] += n[(first + i) * C + first + s] * dst[(first + s) * t.NR + j]


@T.macro
def substitute_back(dst, t, n, C, first):
    """As substitute, from the last row on and with n transposed: rows of (I - n^T) dst = right."""
    for e in T.serial(t.MR * t.NR):
        dst[first * t.NR + e] = t.acc[e]
    for r in T.serial(t.MR):
        for s in T.serial(r):
            for j in T.serial(t.NR):
                dst[(first + t.MR - 1 - r) * t.NR + j] += (
                    n[(first + t.MR - 1 - s) * C + first + t.MR - 1 - r] * dst[(first + t.MR - 1 - s) * t.NR + j]
                )


@T.macro
def delta_step(kv, at, ld, K, NR, kS, qS, k, q, v, o, row, column, decay, beta, qk):
    """One token on NR columns of a state, which begin at element `at`; its rows are ld apart.

    k, q, v and o have the token at `row`, v and o their columns from `column` on. kS and qS are scratch.
    """
    for j in T.serial(NR):
        kS[j] = T.float32(0)
        qS[j] = T.float32(0)
    for d in T.serial(K):
        for j in T.serial(NR):
            kS[j] += k[row + d] * kv[at + d * ld + j]
            qS[j] += q[row + d] * kv[at + d * ld + j]
    for j in T.serial(NR):
        kS[j] = (v[row + column + j] - decay * kS[j]) * beta
        o[row + column + j] = decay * qS[j] + qk * kS[j]
    for d in T.serial(K):
        for j in T.serial(NR):
            kv[at + d * ld + j] = decay * kv[at + d * ld + j] + k[row + d] * kS[j]


@T.macro
def crossing(grad, below, u, C):
    """grad[t] = the sum of u[i, j] over j < t <= i, in double. below is scratch. Sums of sums: nothing cancels."""
    for j in T.serial(C):
        below[j] = T.float64(0)
    for i in T.serial(C):
        for j in T.serial(C):
            below[j] += T.cast(u[(C - 1 - i) * C + j], "float64")
        grad[C - 1 - i] = T.float64(0)
        for j in T.serial(C - 1 - i):
            grad[C - 1 - i] += below[j]


@T.macro
def store_tile(dst, acc, i, NR, first, count, store_row):
    """dst[first ...] = row i of a register tile, count columns of it: a full row has a fixed trip."""
    if count >= NR:
        store_row(dst, first, acc, i * NR, NR)
    else:
        store_row(dst, first, acc, i * NR, count)


@T.macro
def transpose_tile(dst, to, dst_ld, src, at, src_ld):
    """dst[to + j * dst_ld + i] = src[at + i * src_ld + j] for 16 x 16 elements."""
    T.evaluate(
        T.call_extern("int32", "tile_transpose16", T.address_of(dst[to]), dst_ld, T.address_of(src[at]), src_ld)
    )


@T.macro
def transpose(dst, dst_ld, src, src_ld, rows, columns):
    """dst[j * dst_ld + i] = src[i * src_ld + j] in tiles of 16 x 16; rows and columns count tiles."""
    for i in T.serial(rows):
        for j in T.serial(columns):
            transpose_tile(dst, j * 16 * dst_ld + i * 16, dst_ld, src, i * 16 * src_ld + j * 16, src_ld)


DEEP = 32  # terms that a register adds up one after the other before their rounding shows


def deep_register_tile(MR, NR, spare):
    """As register_tile, for a depth whose rounding would show: the sum in parts. spare is a tile of scratch."""
    fma = register_tile(MR, NR)

    @T.macro
    def fma_in_parts(acc, depth, a, b):
        fma(acc, T.min(depth, DEEP), a, b)
        for part in T.serial((depth - 1) // DEEP):
            for e in T.serial(MR * NR):
                spare[e] = acc[e]
                acc[e] = T.float32(0)
            fma(
                acc,
                T.min(depth - (part + 1) * DEEP, DEEP),
                lambda i, k: a(i, k + (part + 1) * DEEP),
                lambda k, j: b(k + (part + 1) * DEEP, j),
            )
            for e in T.serial(MR * NR):
                acc[e] += spare[e]

    return fma_in_parts


def register_tile(MR, NR):
    """fma(acc, depth, a, b): acc[i, j] += sum over k < depth of a(i, k) b(k, j) for an MR x NR tile.

    This loop order is the one that gcc keeps in registers: k, then rows (not unrolled by us), then columns
    as vectors of 16. b must be contiguous in j; a may have any layout.
    """

    @T.macro
    def fma(acc, depth, a, b):
        for k in T.serial(depth):
            for i in T.serial(MR):
                for jv in T.serial(NR // 16):
                    for j in T.vectorized(16):
                        acc[i * NR + jv * 16 + j] += a(i, k) * b(k, jv * 16 + j)

    return fma


# ---- products by register tiles; acc is one tile of MR x NR, fma what register_tile or deep_register_tile gave


class TileShape:
    """Rows and columns of a register tile, its accumulators, and the macro that adds a product to them."""

    def __init__(self, MR, NR, acc, fma):
        self.MR, self.NR, self.acc, self.fma = MR, NR, acc, fma


@T.macro
def clear_tile(t):
    for e in T.serial(t.MR * t.NR):
        t.acc[e] = T.float32(0)


@T.macro
def keep_panel(states, at, ld, width, panels, first, NR, rows):
    """A panel of a state, from element `first` on, to columns of a kept one [rows, ld], from element `at` on."""
    for d in T.serial(rows):
        for j in T.serial(width):
            states[at + d * ld + j] = panels[first + d * NR + j]


@T.macro
def scale_tile(t, factor, first):
    """Row i of the tile times factor[first + i]."""
    for i in T.serial(t.MR):
        for j in T.serial(t.NR):
            t.acc[i * t.NR + j] *= factor[first + i]


@T.macro
def product(dst, ld, t, rows, columns, depth, a, b):
    """dst[i * ld + j] = the sum over d < depth of a(i, d) b(d, j); rows and columns count tiles."""
    for ib, jb in T.grid(rows, columns):
        clear_tile(t)
        t.fma(t.acc, depth, lambda i, d: a(ib * t.MR + i, d), lambda d, j: b(d, jb * t.NR + j))
        for i, j in T.grid(t.MR, t.NR):
            dst[(ib * t.MR + i) * ld + jb * t.NR + j] = t.acc[i * t.NR + j]


@T.macro
def lower_product(dst, C, t, depth, a, b):
    """product for dst [C, C] where only the elements on and below the diagonal count: tiles above it are zero."""
    for ib, jb in T.grid(C // t.MR, C // t.NR):
        clear_tile(t)
        if (ib + 1) * t.MR > jb * t.NR:
            t.fma(t.acc, depth, lambda i, d: a(ib * t.MR + i, d), lambda d, j: b(d, jb * t.NR + j))
        for i, j in T.grid(t.MR, t.NR):
            dst[(ib * t.MR + i) * C + jb * t.NR + j] = t.acc[i * t.NR + j]


@T.macro
def add_product(dst, at, ld, t, depth, a, b):
    """One tile of dst, from element `at` on: plus the sum over d < depth of a(i, d) b(d, j)."""
    for i, j in T.grid(t.MR, t.NR):
        t.acc[i * t.NR + j] = dst[at + i * ld + j]
    t.fma(t.acc, depth, a, b)
    for i, j in T.grid(t.MR, t.NR):
        dst[at + i * ld + j] = t.acc[i * t.NR + j]


@T.macro
def add_columns(dst, dot, t, factor, x, first, column, C, dots):
    """Column j of the tile, a token, times factor[j], added to dst [D, C]; if dots > 0, dot[j] += its product with x.

    The tile begins at row `first` and at `column` of dst and of x [D, C].
    """
    for i, j in T.grid(t.MR, t.NR):
        t.acc[i * t.NR + j] *= factor[column + j]
    for i, j in T.grid(t.MR, t.NR):
        dst[(first + i) * C + column + j] += t.acc[i * t.NR + j]
    if dots > 0:
        for i in T.serial(t.MR):
            for j in T.serial(t.NR):
                dot[column + j] += T.cast(t.acc[i * t.NR + j] * x[(first + i) * C + column + j], "float64")


@T.macro
def update_panel(panels, at, t, rows, depth, decay, a, b):
    """A panel of a state, from element `at` on: decay times itself, plus the sum over d < depth of a(i, d) b(d, j)."""
    for ib in T.serial(rows):
        for e in T.serial(t.MR * t.NR):
            t.acc[e] = panels[at + ib * t.MR * t.NR + e] * decay
        t.fma(t.acc, depth, lambda i, d: a(ib * t.MR + i, d), b)
        for e in T.serial(t.MR * t.NR):
            panels[at + ib * t.MR * t.NR + e] = t.acc[e]


@T.macro
def store_tile_rows(dst, t, first, column, store_row):
    """Rows of the tile that are tokens: dst is the tensor's, first the tile's first row, column its first column."""
    for i in T.serial(t.MR):
        if first + i < dst.rows:
            store_tile(dst.buffer, t.acc, i, t.NR, dst.at(first + i, column), dst.width - column, store_row)


@T.macro
def multiply_rows(dst, src, at, factor, C, NR):
    """dst[c, j] = src[at + c * NR + j] factor[c]: a panel of C rows."""
    for c in T.serial(C):
        for j in T.serial(NR):
            dst[c * NR + j] = src[at + c * NR + j] * factor[c]
