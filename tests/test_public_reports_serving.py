"""What went wrong for others, part 2: compiling, installing, and knowing what serves a call."""

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autotune.verify import check_close
from linattn_tl import LinearState, UnsupportedError, explain, last_backend, linear_attention, stats
from linattn_tl.ops.linear_attention.definition import Options

ROOT = Path(__file__).resolve().parents[1]
ARGS = ("elu1", True, True, 1.0, 1e-6)  # the op's plain options, but for output_final_state


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


# ---- R15: torch.compile and the library ops beneath it


@pytest.mark.usefixtures("binaries")
@pytest.mark.parametrize("backend", ["binary", "torch"])
@pytest.mark.parametrize("final", [False, True], ids=["no-final", "final"])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_R15_compiled_is_eager_for_changing_lengths(backend, final, compiler):
    def run(q, k, v, kv, z):
        o, state = linear_attention(
            2 * q, k, v, initial_state=LinearState(kv, z), output_final_state=final, backend=backend
        )
        return (o + 1, state.kv * 2, state.z) if final else (o + 1,)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(run, fullgraph=True, backend=compiler)
    for T in (64, 65, 130):
        inputs = [
            *qkv(T=T, HV=4),
            torch.randn(1, 4, 16, 16, requires_grad=True),
            torch.rand(1, 2, 16, requires_grad=True),
        ]
        got, want = compiled(*inputs), run(*inputs)
        upstream = [torch.randn_like(x) for x in want]
        for x, y in zip(got, want, strict=True):
            check_close(f"T={T}", x.detach(), y.detach().double())
        found, exact = (torch.autograd.grad(out, inputs, upstream) for out in (got, want))
        for x, y in zip(found, exact, strict=True):
            check_close(f"T={T}: gradient", x, y.double())
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= 3, f"{graphs} graphs: more than 2 recompiles"


@pytest.mark.usefixtures("binaries")
@pytest.mark.parametrize(
    "options", [{"causal": False}, {"cu_seqlens": torch.tensor([0, 7, 20])}], ids=["full", "packed"]
)
def test_R15_compiled_without_state(options):
    inputs = qkv()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: linear_attention(*x, **options)[0], fullgraph=True, backend="aot_eager")
    got, want = compiled(*inputs), linear_attention(*inputs, **options)[0]
    check_close("o", got.detach(), want.detach().double())
    upstream = torch.randn_like(want)
    found, exact = (torch.autograd.grad(o, inputs, upstream) for o in (got, want))
    for x, y in zip(found, exact, strict=True):
        check_close("gradient", x, y.double())


CHECKED = {
    "binary": ("binary", torch.float32, None),
    "bfloat16": ("binary", torch.bfloat16, None),
    "packed": ("binary", torch.float32, [0, 7, 7, 20]),
    "torch": ("torch", torch.float32, None),
    "torch-bfloat16": ("torch", torch.bfloat16, None),
    "torch-packed": ("torch", torch.float32, [0, 7, 7, 20]),
    "float64": ("auto", torch.float64, None),
}


@pytest.mark.usefixtures("binaries")
@pytest.mark.parametrize("row", CHECKED.values(), ids=CHECKED)
@pytest.mark.parametrize("state", [False, True], ids=["no-state", "state"])
@pytest.mark.parametrize("final", [False, True], ids=["no-final", "final"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_R15_opcheck(row, state, final, causal):
    backend, dtype, lengths = row
    q, k, v = qkv(T=20, HV=4, V=24, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    N = 1 if lengths is None else len(lengths) - 1
    kv, z = torch.randn(N, 4, 16, 24, dtype=wide), torch.rand(N, 2, 16, dtype=wide)
    given = (kv.requires_grad_(), z.requires_grad_()) if state else (None, None)
    cu = None if lengths is None else torch.tensor(lengths)
    opt = Options(causal=causal, output_final_state=final)
    tolerance = {"atol": 1e-5, "rtol": 1e-4} if dtype != torch.bfloat16 else {"atol": 0.05, "rtol": 0.05}
    torch.library.opcheck(
        torch.ops.linattn_tl.linear_attention.default, (q, k, v, *given, cu, *opt, backend), **tolerance
    )


@pytest.mark.usefixtures("binaries")
@pytest.mark.parametrize("backend", ["binary", "torch"])
def test_R15_opcheck_decode(backend):
    q, k, v = qkv(B=3, T=2, HV=4, V=24, grad=False)
    kv, z, out = torch.randn(5, 4, 16, 24), torch.rand(5, 2, 16), torch.zeros_like(v)
    slots = torch.tensor([4, -1, 0])
    op = torch.ops.linattn_tl.linear_attention_decode.default
    torch.library.opcheck(op, (q, k, v, kv, z, out, slots, *ARGS, backend))


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
        foreign = [
            s for s in listing.splitlines() if any(n in s for n in ("c10", "at::", "torch", " Py", "TVM", "tvm"))
        ]
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
        assert [name for name, _ in said.rows] == ["binary", "jit", "torch"]
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
