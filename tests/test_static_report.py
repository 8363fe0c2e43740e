"""The static report: its table, and one row of it made for real."""

import json
from dataclasses import replace

import pytest

from autotune import cuda_build
from benchmarks import static_report
from benchmarks.static_report import Row, table
from tl_kernels.spec import Problem

ROW = Row(
    kernel="linear_attention.forward",
    arch="sm_90a",
    dtype="bfloat16",
    head_dim=128,
    config="Config(C=64)",
    registers=168,
    spill_bytes=0,
    smem_bytes=141312,
    image_bytes=19456,
    instructions={"HGMMA": 28, "UTMALDG": 6, "STL": 0},
    clean=True,
    bytes_per_token_head=1040.0,
    floor_ratio=1.015625,
    sector_ratio=1.0,
    worst_conflict=2.0,
)


def test_a_row_of_the_table():
    head, row = table([ROW]).splitlines()
    assert head.split()[:4] == ["kernel", "arch", "dtype", "D"]
    for word in ("forward", "sm_90a", "168", "138", "19.0", "HGMMA UTMALDG", "1040", "1.02", "clean"):
        assert word in row


def test_what_is_not_clean_or_not_known_is_said():
    text = table([replace(ROW, clean=False, instructions=None)])
    assert "NOT CLEAN" in text
    assert " ? " in text


@pytest.mark.skipif(bool(cuda_build.missing()), reason=cuda_build.missing())
def test_decode_moves_its_state_once():
    """bf16, K = V = 32: the state to and fro is nearly all there is to move."""
    kernel = next(k for k in static_report.reported() if k.name.endswith("decode"))
    row = static_report.report(kernel, Problem(kernel.op, "bfloat16", 32, 32, "cuda"), "sm_80")
    assert row.clean
    assert row.spill_bytes == 0
    assert 1.0 <= row.floor_ratio < 1.2
    assert row.registers > 0 and row.image_bytes > 0


def test_an_unknown_arch_is_refused(monkeypatch):
    monkeypatch.setattr(cuda_build, "missing", lambda: "")
    with pytest.raises(ValueError, match="sm_70"):
        static_report.main(["--arch", "sm_70"])


def test_json(monkeypatch, capsys):
    monkeypatch.setattr(static_report, "collect", lambda *args: [ROW])
    monkeypatch.setattr(cuda_build, "missing", lambda: "")
    assert static_report.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["registers"] == 168
