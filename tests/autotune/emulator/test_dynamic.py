"""Sizes that are known at the call only, and numbers among the arguments."""

import pytest
import torch

from tests.autotune.emulator import kernels


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_batch_length_and_scalars(arch: str):
    kernel = kernels.built(arch, kernels.affine, 64)
    for batch, length, limit in ((1, 64, 64), (2, 100, 71), (3, 1, 5), (2, 65, 0)):
        X = kernels.tensor(batch, length, 64, dtype=torch.float16)
        S = kernels.tensor(length)
        Y = kernels.unwritten(batch, length, 64, dtype=torch.float16)
        report = kernel(X, S, Y, limit, 1.5)
        report.assert_clean()
        kernels.assert_close(Y + 1, kernels.affine_reference(X, S, limit, 1.5) + 1, 2e-3)
        assert report.sizes["B"] == batch
        assert report.sizes["L"] == length
        assert report.blocks == batch * -(-length // 64)


@pytest.mark.parametrize(("arch", "stages"), [("sm_80", 1), ("sm_90a", 2)])
def test_trip_count_of_a_pipelined_loop(arch: str, stages: int):
    """One build serves every length: no tile, one, and more than there are buffers. A row is a multiple of 16 bytes."""
    kernel = kernels.built(arch, kernels.tiles, 64, None, (32, 64), stages)
    for columns in (8, 64, 72, 200):
        X = kernels.tensor(64, columns, dtype=torch.float16)
        Y = torch.full_like(X, float("nan"))
        kernel.check(X, Y).assert_clean()
        assert torch.equal(X, Y)


def test_a_size_that_does_not_fit_is_refused():
    kernel = kernels.built("sm_80", kernels.affine, 64)
    X, S = kernels.tensor(2, 64, 64, dtype=torch.float16), kernels.tensor(65)
    with pytest.raises(ValueError, match=r"S has shape \(65,\); expected .*64.*L from X"):
        kernel(X, S, torch.zeros_like(X), 1, 1.0)
