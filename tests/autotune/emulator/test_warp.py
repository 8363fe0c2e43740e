"""Shuffles, votes, matches and sums over a warp."""

import pytest
import torch

from tests.autotune.emulator import kernels

ARCHES = ["sm_80", "sm_90a", "sm_120a"]


@pytest.mark.parametrize("arch", [*ARCHES, "sm_100a"])
def test_exchanges(arch: str):
    """sm_100a has redux.sync for float, and TileLang uses it."""
    X, Y = kernels.tensor(64), kernels.unwritten(7, 64)
    kernel = kernels.built(arch, kernels.warp_exchanges)
    for settings in kernels.SCHEDULES:
        kernel(X, Y, **settings).assert_clean()
        assert torch.allclose(Y.double(), kernels.warp_exchanges_reference(X), rtol=1e-5, atol=1e-5), settings


def votes() -> tuple[torch.Tensor, torch.Tensor]:
    """Values that differ from lane to lane, and values that agree in the first warp alone."""
    mixed, equal = torch.randint(0, 7, (64,), dtype=torch.int32), torch.full((64,), 3, dtype=torch.int32)
    equal[40] = 9
    return mixed, equal


@pytest.mark.parametrize("arch", ARCHES)
def test_votes(arch: str):
    kernel = kernels.built(arch, kernels.warp_votes)
    for X in votes():
        for settings in kernels.SCHEDULES:
            Y = kernels.unwritten(6, 64, dtype=torch.int32)
            kernel(X, Y, **settings).assert_clean()
            expected = kernels.warp_votes_reference(X)
            assert [row for row in range(6) if not torch.equal(Y[row], expected[row])] == [], settings


def test_votes_of_a_block():
    kernel = kernels.built("sm_80", kernels.block_votes)
    for X in votes():
        for settings in kernels.SCHEDULES:
            Y = kernels.unwritten(3, 64, dtype=torch.int32)
            kernel(X, Y, **settings).assert_clean()
            assert torch.equal(Y, kernels.block_votes_reference(X)), settings
