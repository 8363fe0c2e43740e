"""The tile programs of tl_kernels/macros.py one by one, against numpy, at every CPU level this machine runs."""

import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tile_calls
import torch

from autotune import target

DTYPES = ("float32", "bfloat16", "float16")
MAPS = {"elu1": 0, "relu": 1, "identity": 2}
C, NR, MR = 4, 32, 2
LOWEST = np.float32(-87)
ODD = (np.nan, -np.inf, np.inf, 0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, -1e30, 1e30, 3.4e38, 1, -1, 88.8)
NEAR_LOWEST = (-86.99999, -87, -87.00001, -87.1, -87.33655, -88, -103.9, -104, -1e5)
SPECIAL = np.array([*ODD, *NEAR_LOWEST], np.float32)


def programs() -> Iterator[Any]:
    """A prim_func a macro, and a format where it has one."""
    import tilelang.language as T

    from tl_kernels import macros as m

    n = T.dynamic("n")

    def elementwise(fn: Callable[[Any], Any]) -> Any:
        @T.prim_func
        def program(x: T.Tensor([n], "float32"), y: T.Tensor([n], "float32"), count: T.int32):
            with T.Kernel(1) as _:
                for i in T.serial(count):
                    y[i] = fn(x[i])

        return program

    for fn in (m.exp, m.elu1, m.relu, m.elu1_slope, m.relu_slope):
        yield tile_calls.named(fn.__name__, elementwise(fn))

    @T.prim_func
    def transpose(
        dst: T.Tensor([n], "float32"),
        src: T.Tensor([n], "float32"),
        dst_ld: T.int32,
        src_ld: T.int32,
        rows: T.int32,
        columns: T.int32,
    ):
        with T.Kernel(1) as _:
            m.transpose(dst, m.named(dst_ld), src, m.named(src_ld), m.named(rows), m.named(columns))

    yield transpose

    @T.prim_func
    def multiply(
        a: T.Tensor([n], "float32"),
        b: T.Tensor([n], "float32"),
        acc: T.Tensor([n], "float32"),
        depth: T.int32,
    ):
        with T.Kernel(1) as _:
            m.register_tile(MR, NR)(acc, m.named(depth), lambda i, k: a[i * depth + k], lambda k, j: b[k * NR + j])

    yield multiply

    for dtype in DTYPES:
        yield from _row_programs(T, m, n, dtype)


def _row_programs(T: Any, m: Any, n: Any, dtype: str) -> Iterator[Any]:
    io = m.storage(dtype)
    load_row, store_row = m.row_format(dtype)

    @T.prim_func
    def load(dst: T.Tensor([n], "float32"), src: T.Tensor([n], io), i: T.int32, j: T.int32, width: T.int32):
        with T.Kernel(1) as _:
            load_row(dst, m.named(i), src, m.named(j), m.named(width))

    @T.prim_func
    def store(dst: T.Tensor([n], io), src: T.Tensor([n], "float32"), i: T.int32, j: T.int32, width: T.int32):
        with T.Kernel(1) as _:
            store_row(dst, m.named(i), src, m.named(j), m.named(width))

    @T.prim_func
    def load_rows(
        dst: T.Tensor([n], "float32"),
        src: T.Tensor([n], io),
        ld: T.int32,
        stride: T.int64,
        rows: T.int32,
        width: T.int32,
        base: T.int32,
        feature_map: T.int32,
    ):
        with T.Kernel(1) as _:
            m.load_features(dst, m.named(ld), m.Rows(src, stride, rows, width, base), C, load_row, feature_map)

    @T.prim_func
    def load_panels(
        dst: T.Tensor([n], "float32"),
        src: T.Tensor([n], io),
        stride: T.int64,
        rows: T.int32,
        width: T.int32,
        base: T.int32,
        feature_map: T.int32,
    ):
        with T.Kernel(1) as _:
            m.load_feature_panels(dst, NR, m.Rows(src, stride, rows, width, base), C, load_row, feature_map)

    @T.prim_func
    def store_slopes(
        dst: T.Tensor([n], io),
        grad: T.Tensor([n], "float32"),
        x: T.Tensor([n], io),
        slope: T.Tensor([n], "float32"),
        ld: T.int32,
        dst_stride: T.int64,
        x_stride: T.int64,
        rows: T.int32,
        width: T.int32,
        feature_map: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(1) as _:
            m.store_slopes(
                m.Rows(dst, dst_stride, rows, width), grad, m.named(ld), m.Rows(x, x_stride, rows, width),
                slope, load_row, store_row, feature_map, scale,
            )  # fmt: skip

    @T.prim_func
    def store_tile(dst: T.Tensor([n], io), acc: T.Tensor([n], "float32"), line: T.int32, at: T.int32, width: T.int32):
        with T.Kernel(1) as _:
            m.store_tile(dst, acc, m.named(line), NR, 7 * at, m.named(width), store_row)

    @T.prim_func
    def normalize_grads(
        dn: T.Tensor([n], "float32"),
        dden: T.Tensor([n], "float32"),
        inv: T.Tensor([n], "float32"),
        den: T.Tensor([n], "float32"),
        o: T.Tensor([n], io),
        row: T.Tensor([n], "float32"),
        total: T.Tensor([n], "float32"),
        ld: T.int32,
        stride: T.int64,
        den_stride: T.int64,
        rows: T.int32,
        width: T.int32,
        normalize: T.int32,
    ):
        with T.Kernel(1) as _:
            m.invert(inv, dden, m.Rows(den, den_stride, rows, 1), C, normalize)
            o_rows = m.Rows(o, stride, rows, width)
            m.normalize_grads(dn, m.named(ld), dden, inv, o_rows, row, total, load_row, normalize)

    for program in (load, store, load_rows, load_panels, store_slopes, store_tile, normalize_grads):
        yield tile_calls.named(f"{program.attrs['global_symbol']}_{dtype}", program)


@pytest.fixture(scope="module")
def emitted() -> tile_calls.Emitted:
    return tile_calls.emit(programs())


@pytest.fixture(scope="module", params=[t.arch for t in target.offered()])
def calls(request: pytest.FixtureRequest, emitted: tile_calls.Emitted) -> tile_calls.TileCalls:
    return tile_calls.load(emitted, target.named(request.param))


def nans(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


def elementwise(calls: tile_calls.TileCalls, name: str, x: np.ndarray) -> np.ndarray:
    y = nans(*x.shape)
    getattr(calls, name)(x=x, y=y, count=x.size)
    return y


def encode(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 -> the buffer of a kernel, as torch rounds."""
    if dtype == "float32":
        return x.copy()
    return torch.from_numpy(x).to(getattr(torch, dtype)).view(torch.uint16).numpy().copy()


def decode(x: np.ndarray, dtype: str) -> np.ndarray:
    """A kernel's buffer -> float32."""
    return x if dtype == "float32" else torch.from_numpy(x).view(getattr(torch, dtype)).float().numpy()


def same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal bit by bit, a NaN with any NaN."""
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    number = ~np.isnan(expected)
    bits = f"u{actual.dtype.itemsize}"
    np.testing.assert_array_equal(actual[number].view(bits), expected[number].view(bits))


# ---- feature maps


def ulps(actual: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The error in units of the last place of the rounded truth."""
    return np.abs(actual - exact) / np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)


def negatives() -> np.ndarray:
    """[-87, 0]: every 131st float, and all those next to the ends and to the points where 2^n changes."""
    lowest = int(LOWEST.view(np.uint32))
    zero = 1 << 31
    parts = [np.arange(zero, lowest, 131), np.arange(zero, zero + 9999), np.arange(lowest - 9999, lowest + 1)]
    for n in range(126):
        near = int(np.float32(-(n + 0.5) * np.log(2)).view(np.uint32))
        parts.append(np.arange(near - 99, near + 100))
    return np.concatenate(parts).astype(np.uint32).view(np.float32)


def test_exp_is_close(calls: tile_calls.TileCalls):
    x = negatives()
    assert ulps(elementwise(calls, "exp", x), np.exp(x.astype(np.float64))).max() <= 6


def test_exp_is_as_close_as_it_says(calls: tile_calls.TileCalls):
    from tl_kernels import macros

    claim = re.search(r"([\d.]+) ulp for x in \[-87, 0\]", macros.exp.__doc__ or "")
    assert claim, "the docstring of exp no longer claims an error"
    x = negatives()
    assert ulps(elementwise(calls, "exp", x), np.exp(x.astype(np.float64))).max() <= float(claim[1])


def test_exp_below_the_lowest_is_zero(calls: tile_calls.TileCalls):
    below = np.arange(int(LOWEST.view(np.uint32)) + 1, int(np.float32(-np.inf).view(np.uint32)) + 1, 997)
    x = np.append(below.astype(np.uint32).view(np.float32), np.float32(-np.inf))
    assert x[0] == np.nextafter(LOWEST, np.float32(-99))
    assert not elementwise(calls, "exp", x).any()
    assert elementwise(calls, "exp", np.full(1, LOWEST)) > np.finfo(np.float32).tiny


@pytest.mark.parametrize("name", ["exp", "elu1", "elu1_slope", "relu"])
def test_nan_stays_nan(calls: tile_calls.TileCalls, name: str):
    bits = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF] * 3, np.uint32)
    assert np.isnan(elementwise(calls, name, bits.view(np.float32))).all()


def everywhere() -> np.ndarray:
    """The special values, and every 2027th float of all."""
    return np.concatenate([SPECIAL, np.arange(0, 1 << 32, 2027).astype(np.uint32).view(np.float32)])


def phi(name: str, x: np.ndarray) -> np.ndarray:
    """In float64; exp below -87 is 0, as macros.exp says."""
    x = x.astype(np.float64)
    if name == "identity":
        return x
    if name == "relu":
        return np.where(np.isnan(x), np.nan, np.maximum(x, 0))
    return np.where(x > 0, x + 1, np.where(x < LOWEST, 0, np.exp(np.minimum(x, 0))))


def phi_slope(name: str, x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    if name == "identity":
        return np.ones_like(x)
    if name == "relu":
        return (x > 0).astype(np.float64)
    return np.where(x > 0, 1, np.where(x < LOWEST, 0, np.exp(np.minimum(x, 0))))


@pytest.mark.parametrize("name", ["elu1", "relu", "elu1_slope", "relu_slope"])
def test_feature_maps_on_the_whole_range(calls: tile_calls.TileCalls, name: str):
    x = everywhere()
    with np.errstate(invalid="ignore"):  # signalling NaNs
        exact = phi_slope(name[:4], x) if name.endswith("_slope") else phi(name, x)
    actual = elementwise(calls, name, x)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(exact))
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(actual[~finite], exact[~finite].astype(np.float32))
    bound = np.where((x[finite] < 0) & name.startswith("elu1"), 6, 0.5)  # x + 1 is one rounding
    assert (ulps(actual[finite], exact[finite]) <= bound).all()
    assert (actual[x < LOWEST] == 0).all()


# ---- formats


def test_float32_rows_are_copies(calls: tile_calls.TileCalls):
    x = everywhere()
    for call in (calls.load_float32, calls.store_float32):
        y = nans(x.size)
        call(dst=y, src=x, i=0, j=0, width=x.size)
        np.testing.assert_array_equal(y.view(np.uint32), x.view(np.uint32))


def test_every_bfloat16_loads_exactly(calls: tile_calls.TileCalls):
    src, dst = tile_calls.half_bits(), nans(1 << 16)
    calls.load_bfloat16(dst=dst, src=src, i=0, j=0, width=1 << 16)
    np.testing.assert_array_equal(dst.view(np.uint32), src.astype(np.uint32) << 16)


def test_every_float16_loads_exactly(calls: tile_calls.TileCalls):
    src, dst = tile_calls.half_bits(), nans(1 << 16)
    calls.load_float16(dst=dst, src=src, i=0, j=0, width=1 << 16)
    same(dst, decode(src, "float16"))


def roundings(dtype: str) -> np.ndarray:
    """A million random patterns, each number of the format, each halfway point between two, and their neighbours."""
    random = np.random.default_rng(0).integers(0, 1 << 32, 1_000_000, np.uint32)
    if dtype == "bfloat16":
        exact = tile_calls.half_bits().astype(np.uint32) << 16
        halfway = exact + 0x8000
        return np.concatenate([random, *(np.concatenate([b - 1, b, b + 1]) for b in (exact, halfway))]).view(np.float32)
    numbers = decode(tile_calls.half_bits(), "float16")
    numbers = np.sort(numbers[np.isfinite(numbers)])
    beyond = np.float32(65520)  # halfway from the largest to what would follow it
    halfway = np.concatenate([(numbers[1:] + numbers[:-1]) / 2, [beyond, -beyond]]).astype(np.float32)
    around = [np.nextafter(p, np.float32(w)) for p in (numbers, halfway) for w in (-np.inf, np.inf)]
    return np.concatenate([random.view(np.float32), numbers, halfway, *around, SPECIAL])


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_stores_round_as_torch_does(calls: tile_calls.TileCalls, dtype: str):
    x = roundings(dtype)
    dst = np.full(x.size, 0xABCD, np.uint16)
    getattr(calls, f"store_{dtype}")(dst=dst, src=x, i=0, j=0, width=x.size)
    same(decode(dst, dtype), decode(encode(x, dtype), dtype))
    assert np.isnan(x).sum() > 1000


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_width_touch_nothing_else(calls: tile_calls.TileCalls, dtype: str):
    x = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    encoded = encode(x, dtype)
    rounded = decode(encoded, dtype)
    for width in (*range(36), 47, 48, 49):
        for i, j in ((0, 0), (3, 1)):
            wide = nans(64)
            getattr(calls, f"load_{dtype}")(dst=wide, src=encoded, i=i, j=j, width=width)
            expected = nans(64)
            expected[i : i + width] = rounded[j : j + width]
            same(wide, expected)
            out = np.full(64, 0x7FC1, encoded.dtype)
            expected_out = out.copy()
            getattr(calls, f"store_{dtype}")(dst=out, src=x, i=i, j=j, width=width)
            expected_out[i : i + width] = encoded[j : j + width]
            np.testing.assert_array_equal(out, expected_out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_at_the_end_of_a_page(calls: tile_calls.TileCalls, dtype: str):
    """A read or a write beyond the row is a crash, hence another process."""
    script = Path(__file__).with_name("page_end.py")
    command = [sys.executable, str(script), str(calls.path), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "80 calls\n", "")


# ---- tiles


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("slack", [(0, 0), (1, 0), (0, 5), (16, 48)])
def test_transpose(calls: tile_calls.TileCalls, rows: int, columns: int, slack: tuple[int, int]):
    """rows and columns in tiles of 16; rows of both matrices may lie further apart than they are long."""
    src_ld, dst_ld = columns * 16 + slack[0], rows * 16 + slack[1]
    src = np.arange(rows * 16 * src_ld, dtype=np.float32).reshape(rows * 16, src_ld)
    dst = nans(columns * 16, dst_ld)
    expected = dst.copy()
    expected[:, : rows * 16] = src[:, : columns * 16].T
    calls.transpose(dst=dst, src=src, dst_ld=dst_ld, src_ld=src_ld, rows=rows, columns=columns)
    np.testing.assert_array_equal(dst, expected)


@pytest.mark.parametrize("depth", [0, 1, 7, 64])
def test_register_tile_adds_a_product(calls: tile_calls.TileCalls, depth: int):
    rng = np.random.default_rng(depth)
    a, b, acc = (rng.standard_normal(s).astype(np.float32) for s in ((MR, depth), (depth, NR), (MR, NR)))
    exact = acc + a.astype(np.float64) @ b.astype(np.float64)
    calls.multiply(a=a, b=b, acc=acc, depth=depth)
    np.testing.assert_allclose(acc, exact, rtol=0, atol=1e-6 * max(depth, 1))


def ragged(dtype: str, rows: int, width: int, stride: int, base: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """(a buffer with NaN wherever the rows are not, the float32 values of the rows)."""
    x = nans(base + C * stride)
    values = np.random.default_rng(width).standard_normal((rows, width)).astype(np.float32)
    for c in range(rows):
        x[base + c * stride :][:width] = values[c]
    return encode(x, dtype), decode(encode(values, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature_map", MAPS)
def test_load_rows_fills_with_zeros(calls: tile_calls.TileCalls, dtype: str, feature_map: str):
    """Zero, and not phi(0), beyond the rows and the width: padding must add nothing to a sum."""
    for rows, width in itertools.product((0, 1, C - 1, C), (1, 15, 16, 17, 40)):
        ld = (width + 15) // 16 * 16
        src, values = ragged(dtype, rows, width, stride=width + 2)
        dst, expected = nans(C * ld + 8), np.zeros((C, ld))
        expected[:rows, :width] = phi(feature_map, values)
        getattr(calls, f"load_rows_{dtype}")(
            dst=dst, src=src, ld=ld, stride=width + 2, rows=rows, width=width, base=3, feature_map=MAPS[feature_map]
        )
        np.testing.assert_allclose(dst[: C * ld].reshape(C, ld), expected, rtol=1e-6, atol=0)
        assert np.isnan(dst[C * ld :]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature_map", MAPS)
def test_load_panels_fills_with_zeros(calls: tile_calls.TileCalls, dtype: str, feature_map: str):
    for rows, width in itertools.product((0, 1, C - 1, C), (1, NR - 1, NR, NR + 1, 2 * NR + 8)):
        panels = (width + NR - 1) // NR
        src, values = ragged(dtype, rows, width, stride=width + 2)
        dst, expected = nans(panels * C * NR + 8), np.zeros((C, panels * NR))
        expected[:rows, :width] = phi(feature_map, values)
        getattr(calls, f"load_panels_{dtype}")(
            dst=dst, src=src, stride=width + 2, rows=rows, width=width, base=3, feature_map=MAPS[feature_map]
        )
        found = dst[:-8].reshape(panels, C, NR).transpose(1, 0, 2).reshape(C, panels * NR)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=0)
        assert np.isnan(dst[-8:]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize(("rows", "width"), [(C, 32), (C - 1, 19), (1, 1), (0, 16)])
def test_store_slopes(calls: tile_calls.TileCalls, dtype: str, feature_map: str, rows: int, width: int):
    rng = np.random.default_rng(width)
    grad = rng.standard_normal((C, 48)).astype(np.float32)
    x, values = ragged(dtype, rows, width, stride=width + 2, base=0)
    dst = encode(nans(C * (width + 1)), dtype)
    untouched = dst.copy().reshape(C, width + 1)
    slopes = phi_slope(feature_map, values)
    getattr(calls, f"store_slopes_{dtype}")(
        dst=dst, grad=grad, x=x, slope=nans(256), ld=48, dst_stride=width + 1, x_stride=width + 2,
        rows=rows, width=width, feature_map=MAPS[feature_map], scale=0.37,
    )  # fmt: skip
    dst = dst.reshape(C, width + 1)
    exact = 0.37 * slopes * grad[:rows, :width]
    rtol = {"float32": 1e-6, "bfloat16": 2**-8 + 1e-6, "float16": 2**-11 + 1e-6}[dtype]
    np.testing.assert_allclose(decode(dst[:rows, :width].copy(), dtype), exact, rtol=rtol, atol=1e-7)
    np.testing.assert_array_equal(dst[rows:].view("u1"), untouched[rows:].view("u1"))
    np.testing.assert_array_equal(dst[:, width].copy().view("u1"), untouched[:, width].copy().view("u1"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, NR - 1, NR, NR + 1, 200])
def test_store_tile_stores_at_most_its_columns(calls: tile_calls.TileCalls, dtype: str, count: int):
    acc = np.random.default_rng(count).standard_normal((MR, NR)).astype(np.float32)
    dst = encode(nans(256), dtype)
    expected = dst.copy()
    stored = min(count, NR)
    expected[7 : 7 + stored] = encode(acc[1, :stored], dtype)
    getattr(calls, f"store_tile_{dtype}")(dst=dst, acc=acc, line=1, at=1, width=count)
    np.testing.assert_array_equal(dst.view("u1"), expected.view("u1"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalize", [0, 1])
@pytest.mark.parametrize("rows", [0, C - 1, C])
def test_normalize_grads(calls: tile_calls.TileCalls, dtype: str, normalize: int, rows: int):
    """dN = dO / den and dden = -rowsum(dO O) / den; without a normaliser dN = dO and dden = 0."""
    width, ld = 19, 24
    rng = np.random.default_rng(rows)
    dout = rng.standard_normal((C, ld)).astype(np.float32)
    den = rng.uniform(0.5, 2, (C, 3)).astype(np.float32)
    o, values = ragged(dtype, rows, width, stride=width + 2, base=0)
    dn, dden, inv = dout.copy(), nans(C), nans(C)
    getattr(calls, f"normalize_grads_{dtype}")(
        dn=dn, dden=dden, inv=inv, den=den, o=o, row=nans(256), total=nans(1), ld=ld, stride=width + 2,
        den_stride=3, rows=rows, width=width, normalize=normalize,
    )  # fmt: skip
    exact_inv, exact_dden, exact_dn = np.zeros(C), np.zeros(C), dout.astype(np.float64)
    exact_inv[:rows] = 1 / den[:rows, 0].astype(np.float64) if normalize else 1
    if normalize:
        exact_dden[:rows] = -(dout[:rows, :width].astype(np.float64) * values).sum(1) * exact_inv[:rows]
        exact_dn[:rows, :width] *= exact_inv[:rows, None]
    np.testing.assert_allclose(inv, exact_inv, rtol=1e-6)
    np.testing.assert_allclose(dden, exact_dden, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dn, exact_dn, rtol=1e-6)
