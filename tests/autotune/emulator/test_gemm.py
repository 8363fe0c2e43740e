"""T.gemm of every type, layout and instruction path, against the product in float64."""

from typing import Any

import pytest
import torch

from tests.autotune.emulator import kernels

MMA, WGMMA = "sm_80", "sm_90a"
TOLERANCE = {  # of the output's type; sums are float32 or int32 inside
    "float16": 1e-3,  # 2^-11 is 5e-4
    "bfloat16": 6e-3,  # 2^-8 is 4e-3
    "float32": 1e-5,
    "int32": 0.0,
}
SMALL = {"M": 128, "N": 128, "K": 96}
INT8 = {"M": 128, "N": 128, "K": 192, "block": (64, 64, 64), "dtype": "int8", "out": "int32", "accumulate": "int32"}


def check(arch: str, settings: dict[str, Any] | None = None, tolerance: float | None = None, **case: Any) -> Any:
    """Build, run and compare; the report."""
    M, N, K = case["M"], case["N"], case["K"]
    dtype = getattr(torch, {"tfloat32": "float32"}.get(name := case.get("dtype", "float16"), name))
    out = case.get("out", "float32")
    layout = {"transpose_a": case.get("transpose_a", False), "transpose_b": case.get("transpose_b", False)}
    A = kernels.tensor(*((K, M) if layout["transpose_a"] else (M, K)), dtype=dtype, scale=0.5)
    B = kernels.tensor(*((N, K) if layout["transpose_b"] else (K, N)), dtype=dtype, scale=0.5)
    C = kernels.unwritten(M, N, dtype=getattr(torch, out))
    report = kernels.built(arch, kernels.gemm, **case)(A, B, C, **(settings or {}))
    report.assert_clean()
    kernels.assert_close(C, kernels.gemm_reference(A, B, **layout), TOLERANCE[out] if tolerance is None else tolerance)
    return report


@pytest.mark.parametrize("arch", [MMA, "sm_86", "sm_89", WGMMA, "sm_100a", "sm_120a"])
def test_through_shared_memory(arch: str):
    check(arch, **SMALL, out="float16", staged=True)


@pytest.mark.parametrize("arch", [MMA, WGMMA])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
def test_fp16_in_every_layout(arch: str, transpose_a: bool, transpose_b: bool):
    check(arch, **SMALL, transpose_a=transpose_a, transpose_b=transpose_b)


@pytest.mark.parametrize("arch", [MMA, "sm_120a"])
@pytest.mark.parametrize(("transpose_a", "transpose_b"), [(False, True), (True, False)])
def test_tf32(arch: str, transpose_a: bool, transpose_b: bool):
    check(arch, **SMALL, dtype="float32", transpose_a=transpose_a, transpose_b=transpose_b)


def test_tf32_by_wgmma():
    """TileLang takes wgmma only where the tile is of the type tfloat32; then it rounds, and does not cut off."""
    check(WGMMA, tolerance=1e-3, **SMALL, dtype="tfloat32", transpose_b=True)


@pytest.mark.parametrize("arch", [MMA, WGMMA])  # on sm_90a, mma.sync for the first, wgmma for the second
@pytest.mark.parametrize("transpose_b", [False, True])
def test_int8(arch: str, transpose_b: bool):
    check(arch, **INT8, transpose_b=transpose_b)


@pytest.mark.parametrize("arch", [MMA, WGMMA, "sm_120a"])
def test_bf16_with_a_in_registers(arch: str):
    case = {"M": 128, "N": 256, "K": 192, "block": (64, 128, 64), "dtype": "bfloat16", "out": "bfloat16"}
    check(arch, **case, a_in_registers=True, staged=True)


@pytest.mark.parametrize("case", [{**SMALL, "dtype": "float32"}, INT8], ids=["tf32", "int8"])
def test_a_in_registers(case: dict[str, Any]):
    check(MMA, **case, a_in_registers=True, transpose_b=True)


def test_int8_by_wgmma_with_a_in_registers():
    check(WGMMA, **INT8, a_in_registers=True, transpose_b=True)


@pytest.mark.parametrize("arch", [MMA, WGMMA])
@pytest.mark.parametrize("stages", [0, 1, 3])
def test_stages(arch: str, stages: int):
    for settings in kernels.SCHEDULES:
        check(arch, settings, M=128, N=64, K=128, stages=stages)


@pytest.mark.parametrize("arch", [MMA, WGMMA, "sm_120a"])
def test_ragged(arch: str):
    """16-byte rows: cp.async with a size of zero beyond the edge, or TMA that fills with zeros and drops stores."""
    check(arch, M=120, N=136, K=104, out="float16", staged=True)


@pytest.mark.parametrize("arch", [MMA, WGMMA])
def test_odd_sizes(arch: str):
    """No asynchronous copy is aligned: elements are loaded one by one."""
    check(arch, M=67, N=131, K=37)


@pytest.mark.parametrize("arch", [MMA, WGMMA])
def test_256_threads(arch: str):
    """On sm_90a these are two warpgroups that compute and one that loads."""
    case = {"M": 128, "N": 256, "K": 192, "block": (128, 128, 64), "dtype": "bfloat16", "out": "bfloat16"}
    report = check(arch, **case, threads=256, stages=3, staged=True)
    assert sum(report.counters.flops.values()) == 2 * 128 * 256 * 192


@pytest.mark.parametrize("arch", [MMA, WGMMA])
def test_sums_in_fp16(arch: str):
    """96 products are added in half precision: the error is of its rounding, about sqrt(96) 2^-11."""
    check(arch, tolerance=5e-3, **SMALL, out="float16", accumulate="float16", staged=True)


@pytest.mark.parametrize("arch", [MMA, WGMMA])
def test_one_warp(arch: str):
    check(arch, M=32, N=64, K=64, block=(32, 32, 32), threads=32)


@pytest.mark.parametrize("arch", [MMA, WGMMA])
def test_m_of_16(arch: str):
    check(arch, M=32, N=64, K=64, block=(16, 64, 32), transpose_b=True)
