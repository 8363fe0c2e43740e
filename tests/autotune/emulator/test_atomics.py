"""Atomic additions, maxima and minima, element by element, in pairs and fours and by TMA."""

import pytest
import torch

from tests.autotune.emulator import kernels


@pytest.mark.parametrize(("arch", "dtype"), [("sm_80", "float32"), ("sm_80", "float16"), ("sm_90a", "float32")])
def test_histogram(arch: str, dtype: str):
    """512 threads of four blocks meet in eight bins; the previous counts are each given out once."""
    n, bins = 512, 8
    X = kernels.tensor(n, dtype=getattr(torch, dtype))
    which = torch.randint(0, bins, (n,), dtype=torch.int32)
    kernel = kernels.built(arch, kernels.atomic_histogram, n, bins, dtype)
    for settings in kernels.SCHEDULES:
        total, count = torch.zeros(bins, dtype=X.dtype), torch.zeros(bins, dtype=torch.int32)
        most, least = torch.full_like(total, -9), torch.full_like(total, 9)
        rank = kernels.unwritten(n, dtype=torch.int32)
        kernel(X, which, total, most, least, count, rank, **settings).assert_clean()
        members = [X[which == b].double() for b in range(bins)]
        # some 64 additions, each rounded
        kernels.assert_close(total, torch.stack([m.sum() for m in members]), 1e-5 if dtype == "float32" else 2e-2)
        assert torch.equal(most.double(), torch.stack([m.amax() for m in members]))
        assert torch.equal(least.double(), torch.stack([m.amin() for m in members]))
        assert count.tolist() == [len(m) for m in members]
        for b in range(bins):
            assert sorted(rank[which == b].tolist()) == list(range(len(members[b])))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_atomics_on_shared_memory(arch: str):
    X, Y = torch.randint(0, 8, (512,), dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    kernels.built(arch, kernels.shared_histogram, 512, 8).check(X, Y).assert_clean()
    assert torch.equal(Y, torch.bincount(X, minlength=8).int())


def test_a_plain_access_beside_atomic_ones_is_a_race():
    def edit(source: str) -> str:
        assert source.count("  int condval;") == 1
        return source.replace("  int condval;", "  if (threadIdx.x == 9) total[3] = 1.0f; int condval;")

    kernel = kernels.built_with("sm_80", kernels.atomic_histogram(512, 8), edit=edit)
    which, total, counts = torch.randint(0, 8, (512,), dtype=torch.int32), torch.zeros(8), torch.zeros(8).int()
    report = kernel(kernels.tensor(512), which, total, total + 0, total + 0, counts, torch.zeros_like(which))
    assert {finding.kind for finding in report.findings} == {"race"}
    assert any("AtomicAdd" in f.place.text + f.other_place.text for f in report.findings)


@pytest.mark.parametrize(
    ("arch", "how", "out"),
    [
        ("sm_80", "scalar", "float32"),
        ("sm_80", "pairs", "float16"),
        ("sm_80", "pairs", "float32"),
        ("sm_80", "fours", "float32"),
        ("sm_80", "tile", "float32"),
        ("sm_90a", "pairs", "bfloat16"),
        ("sm_90a", "fours", "float32"),
        ("sm_90a", "tile", "float16"),
        ("sm_90a", "bulk", "float32"),
        ("sm_120a", "bulk", "float32"),
    ],
)
def test_split_k(arch: str, how: str, out: str):
    """Two blocks add into each tile of C, which holds ones."""
    A, B = kernels.tensor(128, 128, dtype=torch.float16), kernels.tensor(128, 64, dtype=torch.float16)
    kernel = kernels.built(arch, kernels.split_k, 128, 64, 128, 2, how, out)
    expected = kernels.gemm_reference(A, B) + 1
    for settings in kernels.SCHEDULES[:2]:
        C = torch.ones(128, 64, dtype=getattr(torch, out))
        kernel(A, B, C, **settings).assert_clean()
        kernels.assert_close(C, expected, {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[out])
