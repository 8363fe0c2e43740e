"""What `import linattn_tl` and its names cost and need, each in a fresh process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 0.3  # over torch
HEAVY = ("tilelang", "tvm", "cupy", "matplotlib", "triton", "tqdm", "scipy", "pandas")

PROGRAM = """
import json, sys, time
import torch
already = set(sys.modules)
start = time.perf_counter()
import linattn_tl
first = time.perf_counter() - start
{more}
total = time.perf_counter() - start
print(json.dumps({{"import_s": first, "total_s": total, "new": sorted(set(sys.modules) - already)}}))
"""
EVERY_NAME = "for name in linattn_tl.__all__: getattr(linattn_tl, name)"


def measure(more="", **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    program = PROGRAM.format(more=more)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timing
def test_import_is_cheap_and_light():
    runs = [measure(EVERY_NAME) for _ in range(3)]
    assert median(r["import_s"] for r in runs) < 0.05, "the bare import does work"
    assert median(r["total_s"] for r in runs) < BUDGET_S
    tops = {m.split(".")[0] for m in runs[0]["new"]}
    assert not tops & set(HEAVY)
    extras = [m for m in runs[0]["new"] if m.startswith(("torch._inductor", "torch._dynamo", "torch.distributed"))]
    assert not extras, f"{len(extras)} modules such as {extras[:3]}"


def test_the_bare_import_brings_nothing_but_itself():
    ours = [m for m in measure()["new"] if m.split(".")[0] in ("linattn_tl", "autotune", "tl_kernels")]
    assert ours == ["linattn_tl"]


@pytest.mark.parametrize("more", ["", EVERY_NAME], ids=["import", "every-name"])
def test_import_needs_no_gpu_and_no_tools(more, tmp_path):
    """Nor a home folder to write to."""
    measure(more, CUDA_VISIBLE_DEVICES="", PATH="", HOME="/nonexistent", LINATTN_TL_CACHE_DIR=str(tmp_path / "absent"))
    assert not (tmp_path / "absent").exists(), "importing wrote to the cache"


def test_a_call_imports_no_compiler_when_binaries_are_there(binaries):
    call = "q = torch.ones(1, 5, 1, 16); linattn_tl.linear_attention(q, q, q, backend='binary')"
    assert not {m.split(".")[0] for m in measure(call)["new"]} & set(HEAVY)


def test_unknown_names_are_refused():
    import linattn_tl

    with pytest.raises(AttributeError, match="'linattn_tl' has no attribute 'attention'"):
        linattn_tl.attention  # noqa: B018
    assert set(linattn_tl.__all__) <= set(dir(linattn_tl))
