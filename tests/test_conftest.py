"""What tests/conftest.py promises: a place for binaries, seeds, threads, and a word about missing GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]

SAMPLE = """
import pytest, torch

@pytest.mark.gpu
def test_on_gpu(): raise AssertionError("no GPU, and yet run")

@pytest.mark.skip(reason="another reason")
def test_elsewhere(): pass

@pytest.mark.parametrize("again", [0, 1])
def test_seeded(again, tmp_path_factory):
    print("SEED", torch.rand(()).item())

def test_threads(): torch.set_num_threads(1)
def test_threads_are_back(): print("THREADS", torch.get_num_threads())
"""


def run_sample(tmp_path):
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-s", "-rA"]
    command += ["--rootdir", str(tmp_path), "-c", str(ROOT / "pyproject.toml"), str(tmp_path)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=tmp_path).stdout


def test_gpu_tests_are_skipped_counted_and_named(tmp_path):
    out = run_sample(tmp_path)
    assert "4 passed, 2 skipped" in out
    assert "1 not run for want of a GPU" in out
    section = out.split("not run for want of a GPU")[1]
    assert "test_on_gpu" in section.split("passed")[0]
    assert "needs a CUDA device" in out


def test_every_test_has_its_own_seed_and_all_threads(tmp_path):
    runs = [run_sample(tmp_path) for _ in range(2)]
    seeds = [[line.split()[-1] for line in out.splitlines() if "SEED" in line] for out in runs]
    assert len(set(seeds[0])) == 2, "two tests have the same random numbers"
    assert seeds[0] == seeds[1], "a test has other random numbers on another day"
    assert "THREADS 2" in runs[0]


def test_binaries_are_kept_between_runs_and_out_of_git():
    from tests import conftest

    folder = Path(os.environ["LINATTN_TL_CACHE_DIR"])
    assert folder.is_dir()
    if folder == conftest.CACHE:
        assert (conftest.CACHE.parent / ".gitignore").read_text() == "*\n"
    assert "LINATTN_TL_BACKEND" not in os.environ and "LINATTN_TL_STRICT" not in os.environ


def test_uninitialised_memory_is_nan(nan_filled):
    assert torch.empty(1000).isnan().all() and torch.ones(2).new_empty(3, 4).isnan().all()
    assert torch.empty(1000, dtype=torch.bfloat16).isnan().all()
