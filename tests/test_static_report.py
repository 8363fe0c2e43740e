"""The static report: its table, and one row of it made for real."""

import json
from dataclasses import replace

import pytest

from autotune import cuda_build, cuda_toolkit, target
from benchmarks import compile_sweep, static_report
from benchmarks.static_report import Row, table
from tl_kernels.spec import Problem

ROW = Row(
    kernel="linear_attention.forward",
    arch="sm_90a",
    dtype="bfloat16",
    head_dim=128,
    sharing=1,
    config="Config(C=64)",
    registers=168,
    spill_bytes=0,
    smem_bytes=141312,
    image_bytes=19456,
    instructions={"HGMMA": 28, "UTMALDG": 6, "STL": 0},
    clean=True,
    bytes_per_token_head=1040.0,
    floor_ratio=1.015625,
    distinct_ratio=1.003,
    sector_ratio=1.0,
    worst_conflict=2.0,
)


def test_a_row_of_the_table():
    head, row = table([ROW]).splitlines()
    assert head.split()[:4] == ["kernel", "arch", "dtype", "D"]
    for word in ("forward", "sm_90a", "168", "138", "19.0", "HGMMA UTMALDG", "1040", "1.02", "1.00", "clean"):
        assert word in row


def test_what_is_not_clean_or_not_known_is_said():
    text = table([replace(ROW, clean=False, instructions=None)])
    assert "NOT CLEAN" in text
    assert " ? " in text


@pytest.mark.skipif(bool(cuda_build.missing()), reason=cuda_build.missing())
def test_decode_moves_its_state_once():
    """bf16, K = V = 32: the state to and fro is nearly all there is to move."""
    problem = Problem("linear_attention", "bfloat16", 32, 32, "cuda")
    (kernel,) = static_report.reported(problem, "sm_80", ["decode"])
    row = static_report.report(kernel, problem, "sm_80")
    assert row.clean
    assert row.spill_bytes == 0
    assert 1.0 <= row.floor_ratio < 1.2
    assert row.distinct_ratio <= row.floor_ratio
    assert row.registers > 0 and row.image_bytes > 0


@pytest.mark.skipif(bool(cuda_build.missing()), reason=cuda_build.missing())
def test_value_heads_that_share_a_key_head():
    """Each asks for the rows of q and k, which are distinct once."""
    problem = Problem("delta_rule", "bfloat16", 64, 64, "cuda")
    (kernel,) = static_report.reported(problem, "sm_90a", ["forward"])
    alone, sharing = (static_report.report(kernel, problem, "sm_90a", n) for n in (1, 2))
    assert alone.clean and sharing.clean
    assert alone.bytes_per_token_head == sharing.bytes_per_token_head
    assert alone.floor_ratio < 1.01 and 1.3 < sharing.floor_ratio < 1.35
    assert sharing.distinct_ratio < 1.01


@pytest.mark.skipif(bool(cuda_build.missing()), reason=cuda_build.missing())
def test_gradients_leave_in_whole_sectors():
    """dq and dk pass through the slope of the feature map in fragments, for stores of 16 bytes."""
    problem = Problem("linear_attention", "bfloat16", 64, 64, "cuda")
    for kernel in static_report.reported(problem, "sm_80", ["backward_q", "backward_kv"]):
        assert static_report.report(kernel, problem, "sm_80").sector_ratio < 1.1


@pytest.mark.skipif(bool(cuda_build.missing()), reason=cuda_build.missing())
@pytest.mark.parametrize(("dtype", "dim"), [("bfloat16", 128), ("float32", 128), ("bfloat16", 64)])
def test_the_largest_kernel_does_not_spill(dtype: str, dim: int):
    """It holds a state, three gradients and the descriptors of 18 products: see autotune/warpgroups.py."""
    device = target.named("sm_90a")
    problem = Problem("delta_rule", dtype, dim, dim, "cuda")
    (kernel,) = static_report.reported(problem, "sm_90a", ["backward"])
    lowered = cuda_build.lower(kernel, problem, kernel.configs(problem, device)[0], device)
    assert cuda_toolkit.compile_cubin(lowered.source, "sm_90a").spill_bytes == 0


def test_an_unknown_arch_is_refused(monkeypatch):
    monkeypatch.setattr(cuda_build, "missing", lambda: "")
    with pytest.raises(ValueError, match="sm_70"):
        static_report.main(["--arch", "sm_70"])


def test_json(monkeypatch, capsys):
    monkeypatch.setattr(static_report, "collect", lambda *args: [ROW])
    monkeypatch.setattr(cuda_build, "missing", lambda: "")
    assert static_report.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["registers"] == 168


# ---- benchmarks/compile_sweep.py


def test_a_sweep_compiles_what_calls_need():
    jobs = compile_sweep.jobs_of(["sm_80", "sm_86"], ["bfloat16"], [64, 128], 1)
    assert len(jobs) == len(set(jobs)) and {job.arch for job in jobs} == {"sm_80", "sm_86"}
    assert {job.kernel for job in jobs} >= {"linear_attention.forward", "linear_attention.decode"}
    assert len(compile_sweep.jobs_of(["sm_80"], ["bfloat16"], [64], 3)) > len(jobs) / 4


def test_a_sweep_names_what_spills():
    jobs = compile_sweep.jobs_of(["sm_80"], ["float32"], [64], 1)[:3]
    found = [
        compile_sweep.Compiled(jobs[0], 20_000, 100),
        compile_sweep.Compiled(jobs[1], 30_000, 255, spill_bytes=16),
        compile_sweep.Compiled(jobs[2], error="nvcc failed"),
    ]
    shown = compile_sweep.table(found)
    assert "3 binaries, 0.05 MB" in shown
    assert f"{jobs[1].kernel} sm_80 float32 64" in shown and "spills 16 bytes" in shown and "nvcc failed" in shown


@pytest.mark.skipif(bool(cuda_build.missing()), reason=cuda_build.missing() or "")
def test_a_sweep_of_one_kernel():
    job = next(j for j in compile_sweep.jobs_of(["sm_80"], ["bfloat16"], [16], 1) if j.kernel.endswith(".scan"))
    found = compile_sweep.compile_one(job)
    assert (found.error, found.spill_bytes) == ("", 0)
    assert 10_000 < found.bytes < 100_000 and 0 < found.registers < 255
