"""Causal linear attention, chunk by chunk, with dynamic batch and length: right and clean in every schedule."""

from typing import Any

import pytest
import torch

from tests.autotune.emulator import kernels

H, D = 2, 64
LENGTHS = (1, 37, 64, 65, 200, 256)
TOLERANCE = {"float16": 4e-3, "bfloat16": 2e-2}  # weights and state are rounded to the type before each product


def inputs(batch: int, length: int, dtype: str) -> list[torch.Tensor]:
    return [kernels.tensor(batch, length, H, D, dtype=getattr(torch, dtype), scale=0.3) for _ in range(3)]


def attend(kernel: Any, batch: int, length: int, dtype: str, feature: bool = False) -> None:
    Q, K, V = inputs(batch, length, dtype)
    out = kernels.unwritten(batch, length, H, D, dtype=Q.dtype)
    kernel(Q, K, V, out, readonly=["Q", "K", "V"]).assert_clean()
    kernels.assert_close(out, kernels.linear_attention_reference(Q, K, V, feature), TOLERANCE[dtype])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_ragged_lengths(arch: str, dtype: str, length: int):
    attend(kernels.built(arch, kernels.linear_attention, H, D, dtype), 1, length, dtype)


@pytest.mark.parametrize(("arch", "stages"), [("sm_80", 1), ("sm_90a", 0), ("sm_90a", 2), ("sm_120a", 1)])
def test_every_schedule(arch: str, stages: int):
    """With stages, the next chunk is on its way while this one is worked on; on sm_80 one stage is the most.

    `check` compares the results bit by bit too.
    """
    kernel = kernels.built(arch, kernels.linear_attention, H, D, stages=stages)
    Q, K, V = inputs(2, 150, "float16")
    out = kernels.unwritten(2, 150, H, D, dtype=Q.dtype)
    report = kernel.check(Q, K, V, out).assert_clean()
    assert len(report.schedules) >= 4
    kernels.assert_close(out, kernels.linear_attention_reference(Q, K, V), TOLERANCE["float16"])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_with_a_feature_map(arch: str):
    attend(kernels.built(arch, kernels.linear_attention, H, D, feature=True), 1, 100, "float16", feature=True)


@pytest.mark.parametrize(
    ("arch", "dtype", "stages"),
    [("sm_80", "bfloat16", 1), ("sm_90a", "float16", 0), ("sm_120a", "bfloat16", 0)],
)
def test_with_gates(arch: str, dtype: str, stages: int):
    kernel = kernels.built(arch, kernels.gated_linear_attention, H, D, dtype, stages=stages)
    for length, settings in zip((37, 65, 200, 128), kernels.SCHEDULES, strict=True):
        batch = 2 if length < 100 else 1
        Q, K, V = inputs(batch, length, dtype)
        G = -torch.rand(batch, length, H) / 10
        out, R = kernels.unwritten(batch, length, H, D, dtype=Q.dtype), kernels.unwritten(batch, length, H)
        N = torch.zeros(H)
        kernel(Q, K, V, G, out, R, N, readonly=["Q", "K", "V", "G"], **settings).assert_clean()
        o, r, n = kernels.gated_linear_attention_reference(Q, K, V, G)
        kernels.assert_close(out, o, TOLERANCE[dtype])
        kernels.assert_close(R, r, 1e-5)
        kernels.assert_close(N, n, 1e-5)
