"""Copies, reductions, scans, softmax and functions of one number."""

import pytest
import torch

from tests.autotune.emulator import kernels

CORE = ["sm_80", "sm_90a", "sm_120a"]
TOLERANCE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 6e-3}  # one rounding of the output

# ---- copies


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("stages", [0, 1, 2, 3])
def test_pipelined_tiles(arch: str, stages: int):
    """Two blocks, three tiles each, the last one 8 columns wide; cp.async or TMA into `stages` buffers."""
    X, Y = kernels.tensor(60, 136, dtype=torch.float16), kernels.unwritten(60, 136, dtype=torch.float16)
    kernel = kernels.built(arch, kernels.tiles, 60, 136, (32, 64), stages)
    for settings in kernels.SCHEDULES:
        Y.fill_(float("nan"))
        kernel(X, Y, **settings).assert_clean()
        assert torch.equal(Y, X), settings


@pytest.mark.parametrize(("dtype", "rows", "columns"), [("float32", 33, 70), ("bfloat16", 64, 128), ("int8", 64, 128)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_transposed(arch: str, dtype: str, rows: int, columns: int):
    X = kernels.tensor(rows, columns, dtype=getattr(torch, dtype))
    Y = kernels.unwritten(columns, rows, dtype=X.dtype)
    kernel = kernels.built(arch, kernels.tiles, rows, columns, (32, 64), 1, dtype, turned=True)
    kernel(X, Y).assert_clean()
    assert torch.equal(Y, X.T)


@pytest.mark.parametrize("arch", [*CORE, "sm_86", "sm_89", "sm_100a"])
def test_from_shared_to_global(arch: str):
    X, Y = kernels.tensor(72, 136, dtype=torch.float16), kernels.unwritten(72, 136, dtype=torch.float16)
    kernels.built(arch, kernels.shared_to_global, 72, 136)(X, Y).assert_clean()
    assert torch.equal(Y, X + 1)


# ---- reductions and scans


@pytest.mark.parametrize(
    ("arch", "threads", "axis", "rows", "columns"),
    [
        ("sm_80", 32, 1, 16, 64),
        ("sm_80", 128, 0, 32, 64),
        ("sm_80", 256, 1, 32, 128),
        ("sm_90a", 128, 1, 16, 256),
        ("sm_90a", 256, 0, 64, 64),
        ("sm_100a", 128, 0, 32, 64),
        ("sm_120a", 128, 1, 32, 64),
    ],
)
def test_reductions(arch: str, threads: int, axis: int, rows: int, columns: int):
    X = kernels.tensor(rows, columns)
    Y = kernels.unwritten(len(kernels.REDUCTIONS), columns if axis == 0 else rows)
    kernels.built(arch, kernels.reductions, rows, columns, threads, axis)(X, Y).assert_clean()
    for name, got, expected in zip(kernels.REDUCTIONS, Y, kernels.reductions_reference(X, axis), strict=True):
        assert kernels.relative_error(got, expected) < TOLERANCE["float32"], name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_reductions_in_half_precision(dtype: str):
    """A thread's partial sums are in float32, and rounded where threads meet: five times for 32 of them."""
    X = kernels.tensor(16, 128, dtype=getattr(torch, dtype))
    Y = kernels.unwritten(len(kernels.REDUCTIONS), 16, dtype=X.dtype)
    kernels.built("sm_80", kernels.reductions, 16, 128, 128, 1, dtype)(X, Y).assert_clean()
    for name, got, expected in zip(kernels.REDUCTIONS, Y, kernels.reductions_reference(X, 1), strict=True):
        assert kernels.relative_error(got, expected) < 2 * TOLERANCE[dtype], name


@pytest.mark.parametrize(("arch", "threads"), [("sm_80", 32), ("sm_80", 256), ("sm_90a", 128), ("sm_120a", 128)])
def test_scans(arch: str, threads: int):
    rows, columns = 32, 96
    U, X = kernels.tensor(columns), kernels.tensor(rows, columns)
    V, Y = kernels.unwritten(columns), kernels.unwritten(len(kernels.SCANS), rows, columns)
    kernel = kernels.built(arch, kernels.scans, rows, columns, threads)
    for settings in kernels.SCHEDULES[:2]:
        kernel(U, V, X, Y, **settings).assert_clean()
        along, expected = kernels.scans_reference(U, X)
        kernels.assert_close(V, along, 1e-6)
        for name, got, want in zip(kernels.SCANS, Y, expected, strict=True):
            assert kernels.relative_error(got, want) < 1e-6, name


@pytest.mark.parametrize(
    ("arch", "dtype"), [*((arch, "bfloat16") for arch in CORE), ("sm_80", "float32"), ("sm_90a", "float16")]
)
def test_softmax(arch: str, dtype: str):
    kernel = kernels.built(arch, kernels.softmax, 64, dtype=dtype)
    for rows in (1, 16, 50):
        X = kernels.tensor(rows, 64, dtype=getattr(torch, dtype), scale=3)
        Y, L = kernels.unwritten(rows, 64, dtype=X.dtype), kernels.unwritten(rows)
        kernel(X, Y, L).assert_clean()
        probabilities, normaliser = kernels.softmax_reference(X)
        kernels.assert_close(Y, probabilities, TOLERANCE[dtype])
        kernels.assert_close(L, normaliser, 1e-6)


# ---- functions


@pytest.mark.parametrize(
    ("arch", "dtype"), [*(("sm_80", dtype) for dtype in TOLERANCE), ("sm_90a", "float32"), ("sm_120a", "float16")]
)
def test_functions(arch: str, dtype: str):
    """Of numbers from 1/32 to 8."""
    X = (torch.arange(1, 257) / 32).to(getattr(torch, dtype))
    Y = kernels.unwritten(len(kernels.UNARY), 256, dtype=X.dtype)
    kernels.built(arch, kernels.unary, 256, dtype)(X, Y).assert_clean()
    for name, got, expected in zip(kernels.UNARY, Y, kernels.functions_reference(X), strict=True):
        # sigmoid is put together from exp, an addition and a division
        assert kernels.relative_error(got, expected) < (3 if name == "sigmoid" else 1) * TOLERANCE[dtype], name


def test_fast_functions():
    """Here they are the exact ones: a GPU's are good to some 2^-21 in this range, which is not modelled."""
    X, Y = torch.arange(1, 129) / 128, kernels.unwritten(len(kernels.FAST), 128)
    kernel = kernels.built("sm_80", kernels.fast, 128)
    assert "__expf" in kernel.source
    kernel(X, Y).assert_clean()
    for name, got, expected in zip(kernels.FAST, Y, kernels.functions_reference(X, kernels.FAST), strict=True):
        assert kernels.relative_error(got, expected) < 1e-6, name
