"""Faults of the tile compiler that need the emulator, or its lowering, to be seen.

Each test passes while the fault is there. When an upgrade of tilelang repairs one, its test fails and says what may go.
"""

import re

import pytest
import torch

from autotune.emulator import EmulatorError, lower
from tests.autotune.emulator import kernels


def repaired(what: str, where: str) -> str:
    return f"tilelang no longer {what}. {where}; remove this test with the detour"


# ---- (1) T.cumsum of a 1-D shared buffer in a pipelined loop


def sums(arch: str, stages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums along chunks of 64 gates, taken in a loop that also loads a tile for a product; and what they should be."""
    X, G, C = kernels.tensor(256, 64, dtype=torch.float16), torch.rand(256), kernels.unwritten(256)
    kernels.built(arch, kernels.sums_in_a_loop, 4, stages)(X, G, C, kernels.unwritten(256, 64))
    return C, G.double().view(4, 64).cumsum(1).view(-1).float()


@pytest.mark.parametrize(("arch", "stages"), [("sm_80", 2), ("sm_90a", 1), ("sm_90a", 2), ("sm_120a", 2)])
def test_cumsum_in_a_pipelined_loop_is_wrong(arch: str, stages: int):
    got, expected = sums(arch, stages)
    why = "Chunk-local sums of gates need no kernel of their own and no second dimension"
    assert not torch.allclose(got, expected), repaired(f"miscomputes T.cumsum with {stages} stages on {arch}", why)


@pytest.mark.parametrize(("arch", "stages"), [("sm_80", 0), ("sm_80", 1), ("sm_90a", 0)])
def test_cumsum_is_right_without_a_pipeline(arch: str, stages: int):
    got, expected = sums(arch, stages)
    assert torch.allclose(got, expected)


# ---- (2) dynamic length with two stages or more, where copies are cp.async


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
def test_dynamic_length_with_two_stages_is_not_lowered(arch: str):
    program = kernels.tiles(64, None, (32, 64), 2)
    with pytest.raises(EmulatorError, match=r"Downcast from tirx\.Sub to ir\.IntImm") as raised:
        lower(program, arch)
        pytest.fail(repaired(f"refuses a dynamic length with two stages on {arch}", "Kernels may have more than one"))
    assert arch in str(raised.value)


# ---- (3) sm_90a without warp specialisation


def test_a_barrier_is_missing_without_warp_specialisation():
    """A warp copies the next chunk over a tile that another warp's wgmma may still read."""
    program = kernels.linear_attention(1, 64, stages=1)
    kernel = kernels.built_with("sm_90a", program, pass_configs={"tl.disable_warp_specialized": True})
    Q, K, V = (kernels.tensor(1, 256, 1, 64, dtype=torch.float16) for _ in range(3))
    report = kernel(Q, K, V, torch.zeros_like(Q))
    found = [f for f in report.findings if f.kind in {"race", "in_flight"} and "cp_async" in f.other_place.text]
    assert found and "wgmma" in found[0].place.text, repaired(
        "leaves out the barrier between a tile's last reader and the next copy into it",
        "tl.disable_warp_specialized may be used on sm_90a",
    )


# ---- (4) sm_75


@pytest.mark.parametrize("transpose_b", [False, True])
def test_products_overrun_their_registers_on_sm_75(transpose_b: bool):
    """ldmatrix.x4 writes eight halves a lane; the last one starts four before the end of the array."""
    import tilelang
    from tilelang import tvm

    target = tvm.target.Target({"kind": "cuda", "arch": "sm_75"})
    with target:
        source = tilelang.lower(
            kernels.gemm(64, 64, 32, stages=0, transpose_b=transpose_b), target=target
        ).kernel_source
    size = int(re.search(r"half_t A_local\[(\d+)\];", source)[1])
    loop, extent = re.search(r"for \(int (\w+) = 0; \w+ < (\d+); .*\n +tl::ptx_ldmatrix_x4\(", source).groups()
    step = int(re.search(rf"&\(A_local\[\({loop} \* (\d+)\)\]\)", source)[1])
    last = (int(extent) - 1) * step + 8
    assert last > size, repaired("overruns the registers of a product on sm_75", "sm_75 may be a target")
