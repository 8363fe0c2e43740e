"""Counters against numbers worked out by hand."""

from typing import Any

import pytest
import torch

from tests.autotune.emulator import kernels

WARPS = 4  # of 128 threads


def buffers(report: Any) -> dict[str, Any]:
    return {buffer.name: buffer for buffer in report.buffers}


def line(report: Any, text: str) -> Any:
    """Counters of the one source line that has the text in it."""
    (site,) = [site for site in report.sites if text in site.place.text]
    return site


def run_strided(far: int, near: int, width: int = 1) -> Any:
    X, Y = kernels.tensor(128, width), torch.zeros(128, far)
    report = kernels.built("sm_80", kernels.strided, far, near, width)(X, Y)
    report.assert_clean()
    assert torch.equal(Y[:, :width], X)
    return report


def test_bytes_requests_and_sectors_of_a_mirror():
    """Two blocks of four warps; a warp's 128 bytes are four sectors of 32, and one pass over the banks."""
    report = kernels.built("sm_80", kernels.mirror, 2)(kernels.tensor(256), kernels.unwritten(256))
    report.assert_clean()
    X, Y = buffers(report)["X"], buffers(report)["Y"]
    assert (X.bytes, X.read, X.unique_read, X.written) == (1024, 1024, 1024, 0)
    assert (Y.bytes, Y.written, Y.unique_written, Y.read) == (1024, 1024, 1024, 0)
    fill, turn, store = line(report, "= X["), line(report, "= x["), line(report, "Y[")
    assert (fill.global_read, fill.global_requests, fill.sectors, fill.ideal_sectors) == (1024, 8, 32, 32)
    assert (fill.shared_written, fill.shared_requests, fill.wavefronts, fill.ideal_wavefronts) == (1024, 8, 8, 8)
    assert (turn.shared_read, turn.wavefronts, turn.conflict_degree) == (1024, 8, 1)
    assert (store.global_written, store.sectors, store.sector_ratio) == (1024, 32, 1)
    assert report.counters.global_bytes == report.counters.unique_bytes == 2048
    assert report.counters.flops == {}
    assert report.blocks == 2


def test_barriers_per_block():
    report = kernels.built("sm_80", kernels.mirror, 2)(kernels.tensor(256), kernels.unwritten(256))
    assert list(report.counters.waits_per_block.values()) == [1]
    assert sum(line(report, "__syncthreads").waits.values()) == 2


def test_a_warp_meets_once():
    """Each of the four warps executes __syncwarp once a block; the barrier of the block opens once."""
    kernel = kernels.built_with(
        "sm_80",
        kernels.mirror(2),
        edit=lambda source: source.replace("__syncthreads();", "__syncthreads(); __syncwarp();"),
    )
    report = kernel(kernels.tensor(256), kernels.unwritten(256)).assert_clean()
    assert report.counters.waits_per_block == {"__syncthreads": 1, "__syncwarp": WARPS}


@pytest.mark.parametrize(("far", "sectors"), [(1, 4), (2, 8), (4, 16), (8, 32), (32, 32)])
def test_sectors_of_a_strided_store(far: int, sectors: int):
    """Every `far`-th word: a warp touches 32 far / 8 sectors, at most 32, where 4 would hold the bytes."""
    store = line(run_strided(far, 1), "Y[")
    assert store.global_requests == WARPS
    assert (store.sectors, store.ideal_sectors) == (sectors * WARPS, 4 * WARPS)
    assert store.sector_ratio == sectors / 4


@pytest.mark.parametrize(("near", "degree"), [(1, 1), (2, 2), (4, 4), (8, 8), (32, 32), (33, 1), (3, 1)])
def test_bank_conflicts(near: int, degree: int):
    """Words `near` apart fall into 32 / gcd(near, 32) banks."""
    report = run_strided(1, near)
    for site in (line(report, "= X["), line(report, "Y[")):
        assert site.shared_requests == WARPS
        assert (site.wavefronts, site.ideal_wavefronts) == (degree * WARPS, WARPS)
        assert site.conflict_degree == degree


def test_vectors_take_a_pass_a_quarter_warp():
    """32 lanes of 16 bytes are 512 bytes: four passes at best, eight lanes each."""
    report = run_strided(4, 4, width=4)
    store = line(report, "Y")
    assert store.shared_read == 128 * 16
    assert (store.wavefronts, store.ideal_wavefronts, store.conflict_degree) == (4 * WARPS, 4 * WARPS, 1)
    assert (store.sectors, store.ideal_sectors) == (16 * WARPS, 16 * WARPS)


def test_the_worst_line_comes_first():
    report = run_strided(8, 32)
    assert "Y[" in report.by_line("global")[0].place.text
    assert report.by_line("shared")[0].conflict_degree == 32


@pytest.mark.parametrize(("arch", "instruction"), [("sm_80", "mma"), ("sm_90a", "wgmma")])
def test_flops_and_traffic_of_a_product(arch: str, instruction: str):
    """128 x 128 x 96 in tiles of 64 x 64: each tile of A and of B is read by two blocks."""
    M, N, K = 128, 128, 96
    A, B = kernels.tensor(M, K, dtype=torch.float16), kernels.tensor(K, N, dtype=torch.float16)
    report = kernels.built(arch, kernels.gemm, M=M, N=N, K=K, out="float16", staged=True)(
        A, B, kernels.unwritten(M, N, dtype=torch.float16)
    )
    report.assert_clean()
    (name,) = report.counters.flops
    assert name.startswith(instruction)
    assert report.counters.flops[name] == 2 * M * N * K
    for name, size in (("A", M * K * 2), ("B", K * N * 2)):
        assert (buffers(report)[name].read, buffers(report)[name].unique_read) == (2 * size, size)
    assert buffers(report)["C"].written == buffers(report)["C"].unique_written == M * N * 2
    assert report.counters.traffic_ratio == (2 * (M * K + K * N) + M * N) / (M * K + K * N + M * N)


def test_shared_memory_of_a_product_by_ldmatrix():
    """Four blocks, three steps: 2 x 2 warps, so that two of them read each half of a tile. The tiles are swizzled."""
    A, B = kernels.tensor(128, 96, dtype=torch.float16), kernels.tensor(96, 128, dtype=torch.float16)
    kernel = kernels.built("sm_80", kernels.gemm, M=128, N=128, K=96, out="float16", staged=True)
    report = kernel(A, B, kernels.unwritten(128, 128, dtype=torch.float16))
    for name in ("A_local", "B_local"):
        sites = [site for site in report.sites if "ldmatrix" in site.place.text and name in site.place.text]
        read = sum(site.shared_read for site in sites)
        assert read == 4 * 3 * 2 * (64 * 32 * 2)
        # an x4 is 512 bytes: four matrices, eight rows of 16 bytes each, a pass for each matrix
        assert sum(site.wavefronts for site in sites) == sum(site.ideal_wavefronts for site in sites) == read // 128
    copies = [site for site in report.sites if "cp_async_gs" in site.place.text]
    assert sum(site.global_read for site in copies) == sum(site.shared_written for site in copies) == 4 * 3 * 8192
    assert all(site.sector_ratio == 1 for site in copies)


def test_tma():
    """Boxes of 64 rows x 64 bytes, and of 32 rows x 128 bytes: each row is a request of whole sectors."""
    A, B = kernels.tensor(128, 96, dtype=torch.float16), kernels.tensor(96, 128, dtype=torch.float16)
    kernel = kernels.built("sm_90a", kernels.gemm, M=128, N=128, K=96, out="float16", staged=True)
    report = kernel(A, B, kernels.unwritten(128, 128, dtype=torch.float16))
    for name, rows in (("A_desc", 64), ("B_desc", 32)):
        site = line(report, f"tma_load({name}")
        assert site.global_read == 4 * 3 * 4096
        assert site.global_requests == 4 * 3 * rows
        assert site.sectors == site.ideal_sectors == site.global_read // 32
        assert site.shared_written == site.global_read


def test_lanes_that_read_one_word():
    """The word is broadcast: one pass, although 128 bytes arrive."""
    old, new = "x[(127 - ((int)threadIdx.x))]", "x[5]"
    kernel = kernels.built_with("sm_80", kernels.mirror(2), edit=lambda source: source.replace(old, new))
    site = line(kernel(kernels.tensor(256), kernels.unwritten(256)), new)
    assert (site.shared_read, site.wavefronts, site.conflict_degree) == (1024, 8, 1)


@pytest.mark.parametrize(("stages", "peak"), [(1, 1), (2, 2), (3, 3)])
def test_bytes_in_flight(stages: int, peak: int):
    """A stage is two tiles of 4096 bytes; as many as there are buffers are under way at once."""
    A, B = kernels.tensor(128, 128, dtype=torch.float16), kernels.tensor(128, 64, dtype=torch.float16)
    kernel = kernels.built("sm_80", kernels.gemm, M=128, N=64, K=128, stages=stages)
    report = kernel(A, B, kernels.unwritten(128, 64))
    assert report.counters.peak_async_bytes == peak * 8192


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_what_is_beyond_the_edge_is_not_read(arch: str):
    """120 x 136 x 104 in tiles of 64 x 64 x 32: two rows and three columns of blocks."""
    M, N, K = 120, 136, 104
    A, B = kernels.tensor(M, K, dtype=torch.float16), kernels.tensor(K, N, dtype=torch.float16)
    report = kernels.built(arch, kernels.gemm, M=M, N=N, K=K, out="float16", staged=True)(
        A, B, kernels.unwritten(M, N, dtype=torch.float16)
    )
    assert (buffers(report)["A"].read, buffers(report)["B"].read) == (3 * M * K * 2, 2 * K * N * 2)
    assert buffers(report)["C"].written == M * N * 2


def test_nothing_is_counted_unless_asked():
    report = kernels.built("sm_80", kernels.mirror, 2)(kernels.tensor(256), kernels.unwritten(256), count=False)
    assert report.counters.total.shared_bytes == 0
