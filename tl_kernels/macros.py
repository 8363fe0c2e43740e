"""Tile programs that CPU kernels share: number formats, feature maps, loads, the register tile.

Imports tilelang; import it inside a builder.

Feature maps, phi(x) and its derivative:

    elu1      x + 1 for x > 0, exp(x) otherwise        1 for x > 0, exp(x) otherwise
    relu      max(x, 0)                                 1 for x > 0, 0 otherwise
    identity  x                                         1
"""

import tilelang.language as T
from tvm.script.ir_builder import tirx

ELU1, RELU, IDENTITY = 0, 1, 2
ACC = "float32"

# ---- number formats: 16-bit floats travel as uint16 and become fp32 by integer arithmetic, which vectorises


def storage(dtype):
    """The buffer dtype that holds dtype in a kernel's signature."""
    return "float32" if dtype == "float32" else "uint16"


def _bits(x):
    return T.reinterpret(x, "uint32")


def _float(u):
    return T.reinterpret(u, "float32")


def _u32(x):
    return T.uint32(x)


def load_bfloat16(h):
    return _float(T.shift_left(T.cast(h, "uint32"), _u32(16)))


def store_bfloat16(x):
    """Round to nearest even; a NaN stays a NaN (rounding up could carry it into the sign)."""
    u = _bits(x)
    rounded = u + _u32(0x7FFF) + (T.shift_right(u, _u32(16)) & _u32(1))
    nan = (u & _u32(0x7FFFFFFF)) > _u32(0x7F800000)
    return T.cast(T.shift_right(T.if_then_else(nan, u | _u32(0x400000), rounded), _u32(16)), "uint16")


def load_float16(h):
    """Move exponent and mantissa into place; subnormals are renormalised by one subtraction."""
    u = T.cast(h, "uint32")
    magnitude = T.shift_left(u & _u32(0x7FFF), _u32(13))
    rebias = _u32(112 << 23)
    normal = _float(magnitude + rebias)
    special = _float(magnitude + rebias + rebias)
    subnormal = _float(magnitude + rebias + _u32(1 << 23)) - _float(_u32(113 << 23))
    value = T.if_then_else(
        magnitude < _u32(1 << 23), subnormal, T.if_then_else(magnitude >= _u32(0x0F800000), special, normal)
    )
    return _float(_bits(value) | T.shift_left(u & _u32(0x8000), _u32(16)))


def store_float16(x):
    """Round to nearest even; overflow becomes infinity, a NaN stays a NaN."""
    u = _bits(x)
    a = u & _u32(0x7FFFFFFF)
    odd = T.shift_right(a, _u32(13)) & _u32(1)
    normal = T.shift_right(a - _u32(112 << 23) + _u32(0xFFF) + odd, _u32(13))
    # adding 0.5 leaves a subnormal half in the last bits of the sum, already rounded
    subnormal = _bits(_float(a) + T.float32(0.5)) - _u32(126 << 23)
    special = T.if_then_else(a > _u32(0x7F800000), _u32(0x7E00), _u32(0x7C00))
    value = T.if_then_else(
        a >= _u32(0x47800000), special, T.if_then_else(a < _u32(0x38800000), subnormal, normal)
    )
    return T.cast(value | T.shift_right(u & _u32(0x80000000), _u32(16)), "uint16")


LOAD = {"float32": lambda x: x, "bfloat16": load_bfloat16, "float16": load_float16}
STORE = {"float32": lambda x: x, "bfloat16": store_bfloat16, "float16": store_float16}

# ---- feature maps

EXP_LOWEST = -87.0  # exp below this is subnormal, and arithmetic on subnormals is 50 times slower


def exp(x):
    """exp(x) = 2^n exp(r) with |r| <= ln(2) / 2 and a degree 6 polynomial: 2 ulp for x in [-87, 0].

    libm's expf is not vectorised without -ffast-math. Below EXP_LOWEST the result is 0.
    """
    n = T.floor(x * T.float32(1.4426950408889634) + T.float32(0.5))
    r = x - n * T.float32(0.6931471805599453)
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
def load_panels(dst, NR, src, C, load):
    """dst[panel, c, j] = src[c, panel * NR + j]; zero beyond the rows and the width. Full panels have a fixed trip."""
    for panel in T.serial((src.width + (NR - 1)) // NR):
        for c in T.serial(C):
            if c < src.rows:
                if (panel + 1) * NR <= src.width:
                    for j in T.serial(NR):
                        dst[(panel * C + c) * NR + j] = load(src.buffer[src.at(c, panel * NR + j)])
                else:
                    for j in T.serial(src.width - panel * NR):
                        dst[(panel * C + c) * NR + j] = load(src.buffer[src.at(c, panel * NR + j)])
                    for j in T.serial((panel + 1) * NR - src.width):
                        dst[(panel * C + c) * NR + src.width - panel * NR + j] = T.float32(0)
            else:
                for j in T.serial(NR):
                    dst[(panel * C + c) * NR + j] = T.float32(0)


@T.macro
def load_rows(dst, ld, src, C, load):
    """dst[c * ld + d] = src[c, d]; zero beyond the rows and the width, up to ld."""
    for c in T.serial(C):
        if c < src.rows:
            for d in T.serial(src.width):
                dst[c * ld + d] = load(src.buffer[src.at(c, d)])
            for d in T.serial(ld - src.width):
                dst[c * ld + src.width + d] = T.float32(0)
        else:
            for d in T.serial(ld):
                dst[c * ld + d] = T.float32(0)


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
def load_features(dst, ld, src, C, load, feature_map):
    """As load_rows, through phi."""
    load_rows(dst, ld, src, C, load)
    for c in T.serial(src.rows):
        map_features(dst, c * ld, named(src.width), feature_map)


@T.macro
def load_feature_panels(dst, NR, src, C, load, feature_map):
    """As load_panels, through phi."""
    load_panels(dst, NR, src, C, load)
    for panel in T.serial((src.width + (NR - 1)) // NR):
        for c in T.serial(src.rows):
            map_features(dst, (panel * C + c) * NR, T.min(NR, src.width - panel * NR), feature_map)


@T.macro
def scale_rows(x, count, scale):
    for e in T.serial(count):
        x[e] *= scale


@T.macro
def store_slopes(dst, grad, ld, x, slope, load, store, feature_map, scale):
    """dst[c, d] = scale phi'(x[c, d]) grad[c * ld + d]: the chain rule through the feature map. slope is scratch."""
    for c in T.serial(x.rows):
        for d in T.serial(x.width):
            slope[d] = load(x.buffer[x.at(c, d)])
        if feature_map == ELU1:
            for d in T.serial(x.width):
                slope[d] = elu1_slope(slope[d])
        else:
            if feature_map == RELU:
                for d in T.serial(x.width):
                    slope[d] = relu_slope(slope[d])
            else:
                for d in T.serial(x.width):
                    slope[d] = T.float32(1)
        for d in T.serial(x.width):
            slope[d] *= grad[c * ld + d] * scale
        for d in T.serial(x.width):
            dst.buffer[dst.at(c, d)] = store(slope[d])


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
def normalize_grads(dn, ld, dden, inv, o, total, load, normalize):
    """In place dO -> dN = dO / den, and dden[c] -= dO . O / den: the normaliser's backward, one value head."""
    for c in T.serial(o.rows):
        if normalize > 0:
            total[0] = T.float32(0)
            for d in T.serial(o.width):
                total[0] += dn[c * ld + d] * load(o.buffer[o.at(c, d)])
            dden[c] -= total[0] * inv[c]
            for d in T.serial(o.width):
                dn[c * ld + d] *= inv[c]


@T.macro
def transpose(dst, dst_ld, src, src_ld, rows, columns):
    """dst[j * dst_ld + i] = src[i * src_ld + j] in tiles of 16 x 16; rows and columns count tiles."""
    for i in T.serial(rows):
        for j in T.serial(columns):
            T.evaluate(
                T.call_extern(
                    "int32",
                    "tile_transpose16",
                    T.address_of(dst[j * 16 * dst_ld + i * 16]),
                    dst_ld,
                    T.address_of(src[i * 16 * src_ld + j * 16]),
                    src_ld,
                )
            )


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
