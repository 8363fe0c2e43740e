"""What went wrong for others, part 3: nothing is built while serving, installing, knowing what serves a call."""

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from linattn_tl import UnsupportedError, explain, last_backend, linear_attention, stats

ROOT = Path(__file__).resolve().parents[1]


def qkv(B=1, T=20, H=2, HV=2, K=16, V=16, dtype=torch.float32, grad=True):
    sizes = ((B, T, H, K), (B, T, H, K), (B, T, HV, V))
    return [torch.randn(*s, dtype=dtype, requires_grad=grad) for s in sizes]


# ---- R11: nothing is compiled or tuned because a length changed


@pytest.mark.usefixtures("binaries")
def test_R11_lengths_cause_no_compile_and_no_tuning():
    random.seed(0)

    def call():
        T = random.randint(1000, 8000)
        cu = torch.tensor(sorted([0, T, *(random.randint(0, T) for _ in range(random.randint(0, 9)))]))
        linear_attention(*qkv(T=T, H=1, HV=1, grad=False), cu_seqlens=cu)

    call()
    before = stats()
    for _ in range(100):
        call()
    assert stats() == before


SERVING = """
import sys, time, torch, linattn_tl
from linattn_tl import linear_attention, linear_attention_decode, stats
q, k, v = (torch.randn(1, 70, 2, 32, requires_grad=True) for _ in "qkv")
if sys.argv[1] == "preloaded":
    served = linattn_tl.preload("linear_attention", K=32, V=32, dtypes=[torch.float32])
    assert served == {"linear_attention float32": "binary", "linear_attention_decode float32": "binary"}, served
    before = stats()
    assert before["binary_load"] == 4
start = time.perf_counter()
o, _ = linear_attention(q, k, v)
first = time.perf_counter() - start
o.sum().backward()
_, state = linear_attention(q, k, v, cu_seqlens=torch.tensor([0, 3, 70]), output_final_state=True)
with torch.no_grad():
    linear_attention_decode(*(x[0, :2] for x in (q, k, v)), state)
if sys.argv[1] == "preloaded":
    assert stats() == before, (before, stats())
assert stats()["compile"] == stats()["tune"] == stats()["fallback"] == 0
assert first < 1, f"the first call took {first:.1f} s"
"""


@pytest.mark.usefixtures("binaries")
@pytest.mark.parametrize("how", ["preloaded", "cold"])
def test_R11_the_first_call_finds_its_binaries(how):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SERVING, how], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- R19: a binary needs neither torch nor Python


def stored_binaries():
    from linattn_tl import settings

    return sorted((settings.cache_dir() / "bin").rglob("*.so"))


@pytest.mark.usefixtures("binaries")
def test_R19_binaries_have_no_symbols_of_torch_or_python():
    files = stored_binaries()
    assert files
    for file in files:
        listing = subprocess.run(["nm", "-D", "-C", file], capture_output=True, text=True, check=True).stdout
        assert "linattn_launch" in listing
        symbols = [line[16:] for line in listing.splitlines()]  # without addresses, in which "c10" is a number
        foreign = [s for s in symbols if any(n in s for n in ("c10", "at::", "torch", " Py", "TVM", "tvm"))]
        assert not foreign, f"{file.name}: {foreign[:5]}"


@pytest.mark.usefixtures("binaries")
def test_R19_binaries_load_in_a_bare_python():
    program = (
        "import ctypes, sys\n"
        "for path in sys.argv[1:]: ctypes.CDLL(path).linattn_launch\n"
        "assert not {'torch', 'tilelang', 'numpy'} & set(sys.modules)\n"
    )
    files = [str(f) for f in stored_binaries()]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# ---- R20: which backend serves, and why no better one does


@pytest.mark.usefixtures("binaries", "fresh_choices")
def test_R20_explain_agrees_with_the_call():
    for dtype, backend in itertools.product((torch.float32, torch.float64), ("auto", "torch")):
        inputs = qkv(dtype=dtype)
        said = explain(linear_attention, *inputs, backend=backend)
        linear_attention(*inputs, backend=backend)
        assert said.backend == last_backend("linear_attention")
        assert [name for name, _ in said.rows] == ["binary", "jit", "cupy", "torch"]
    said = str(explain("linear_attention", *qkv(dtype=torch.float64)))
    assert "float64" in said and "torch serves this call" in said
    assert all(f"{b:<8}cannot: dtype float64" in said for b in ("binary", "jit"))


@pytest.mark.usefixtures("binaries", "fresh_choices")
def test_R20_one_log_line_a_reason(caplog):
    before = stats()["fallback"]
    for K in (16, 24, 16):
        linear_attention(*qkv(K=K, dtype=torch.float64))
    assert len(caplog.records) == 1, caplog.text
    assert "linear_attention" in caplog.text and "dtype float64" in caplog.text and "torch" in caplog.text
    linear_attention(*qkv(K=300))
    assert len(caplog.records) == 2, caplog.text
    assert stats()["fallback"] > before


@pytest.mark.usefixtures("binaries", "fresh_choices")
def test_R20_strict_makes_a_fallback_an_error(monkeypatch):
    monkeypatch.setenv("LINATTN_TL_STRICT", "1")
    linear_attention(*qkv())
    with pytest.raises(UnsupportedError, match=r"linear_attention: LINATTN_TL_STRICT=1.*dtype float64"):
        linear_attention(*qkv(dtype=torch.float64))
    linear_attention(*qkv(dtype=torch.float64), backend="torch")  # asked for by name: no fallback


@pytest.mark.usefixtures("binaries", "fresh_choices")
def test_R20_the_environment_names_the_backend(monkeypatch):
    monkeypatch.setenv("LINATTN_TL_BACKEND", "torch")
    linear_attention(*qkv())
    assert last_backend("linear_attention") == "torch"
    assert explain("linear_attention", *qkv()).backend == "torch"


REPORT = """
import logging, torch
logging.basicConfig(format="LOG %(message)s")
from linattn_tl import LinearState, explain, last_backend, linear_attention, linear_attention_decode, stats
q, k, v = (torch.randn(1, 40, 2, 16) for _ in "qkv")
o, state = linear_attention(q, k, v, output_final_state=True)
linear_attention_decode(q[:, 0], k[:, 0], v[:, 0], state)
print("SERVED", last_backend("linear_attention"), last_backend("linear_attention_decode"), stats()["compile"])
want, _ = linear_attention(q, k, v, backend="torch")
assert (o - want).abs().max() < 1e-4
print(explain("linear_attention", q, k, v))
"""


@pytest.fixture(scope="module")
def site_without_tilelang(tmp_path_factory):
    """site-packages with everything but tilelang."""
    import numpy

    folder = tmp_path_factory.mktemp("site")
    for entry in Path(numpy.__file__).parents[1].iterdir():
        if not entry.name.startswith("tilelang") and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


def report(site, cache, path):
    """What a Python without tilelang, with the given PATH and cache, says of a call."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "LINATTN_TL_CACHE_DIR": str(cache), "PATH": path}
    env.pop("TVM_IMPORT_PYTHON_PATH", None)
    done = subprocess.run([sys.executable, "-S", "-c", REPORT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_R20_without_tilelang_and_binaries_torch_serves_and_says_so(site_without_tilelang, tmp_path):
    out, log = report(site_without_tilelang, tmp_path, os.environ["PATH"])
    assert "SERVED torch torch 0" in out
    assert "cannot: tilelang is not installed" in out
    assert log.count("LOG linear_attention: served by the torch backend") == 1
    assert log.count("LOG linear_attention_decode: served by the torch backend") == 1
    assert "tilelang is not installed" in log


def test_R20_without_a_compiler_and_binaries_torch_serves_and_says_so(tmp_path):
    env = {**os.environ, "LINATTN_TL_CACHE_DIR": str(tmp_path), "PATH": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", REPORT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "SERVED torch torch 0" in done.stdout
    assert "cannot: g++ is not on PATH" in done.stdout
    assert "g++ is not on PATH" in done.stderr


@pytest.mark.usefixtures("binaries")
def test_R20_binaries_serve_without_tilelang_and_compiler(site_without_tilelang):
    from linattn_tl import settings

    out, log = report(site_without_tilelang, settings.cache_dir(), "")
    assert "SERVED binary binary 0" in out
    assert "LOG" not in log
