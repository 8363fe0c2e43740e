"""The decode kernel of the cupy backend, CUDA C++ written by hand: compiled for GPUs, and executed by the emulator."""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from autotune.build import tools
from autotune.emulator import Emulated, Lowered
from autotune.emulator.lowering import Parameter
from linattn_tl import arrays, registry
from linattn_tl.ops.linear_attention import DECODE_OP, arrays_decode
from linattn_tl.ops.linear_attention.arrays import ArrayDecode
from linattn_tl.ops.linear_attention.definition import Options, decode
from tests import conformance, test_bad_input, test_non_finite
from tests.conformance import Case, subjects

ARCHS = ("sm_80", "sm_90", "sm_120")
SUBJECT = subjects()[DECODE_OP.name]
OPTIONS = Options(output_final_state=True)


# ---- compiled


def libraries():
    """Every libnvrtc there is: of a toolkit, or of Python packages."""
    found = [*Path("/usr/local/cuda/lib64").glob("libnvrtc.so.*")]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec is not None else ():
        found += Path(folder).glob("*/lib/libnvrtc.so.*")
    return sorted(found)


def nvrtc(path, source, arch):
    """The cubin, or pytest.fail with what NVRTC says. No driver is needed."""
    library = ctypes.CDLL(str(path))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"decode.cu", 0, None, None)
    options = [f"--gpu-architecture={arch}".encode(), b"-std=c++17"]
    failed = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if failed:
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        pytest.fail(f"{path.name}: {log.value.decode()}")
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    assert library.nvrtcGetCUBIN(program, cubin) == 0
    return cubin.raw


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_by_nvrtc(arch):
    if not libraries():
        pytest.skip("no libnvrtc: neither a toolkit's nor nvidia-cuda-nvrtc's")
    cubin = nvrtc(libraries()[-1], arrays_decode.SOURCE, arch)
    assert cubin.startswith(b"\x7fELF") and arrays_decode.KERNEL.encode() in cubin


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_by_nvcc_without_spills(arch, tmp_path):
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    file = tmp_path / "decode.cu"
    file.write_text(arrays_decode.SOURCE)
    command = [
        nvcc,
        "-cubin",
        "-std=c++17",
        f"-arch={arch}",
        "--resource-usage",
        str(file),
        "-o",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr
    registers = int(re.search(r"Used (\d+) registers", done.stderr)[1])
    assert registers <= 65536 // (4 * arrays_decode.THREADS), f"{registers} registers: not four blocks a multiprocessor"


# ---- executed

POINTERS = ("q", "k", "v", "o", "kv", "z", "slots")
NUMBERS = {
    **dict.fromkeys(("use_slots", "blocks", "shared_bytes", "H", "heads", "K", "V"), "int"),
    **dict.fromkeys(("kv_row", "kv_head", "z_row", "z_head"), "int64_t"),
    **dict.fromkeys(("feature_map", "normalize"), "int"),
    **dict.fromkeys(("scale", "eps"), "float"),
}
WRITTEN = ("o", "kv", "z")
# as TileLang wraps its own kernels: init, call, and the reason of a failure
HOST = """
#include <cutlass/cuda_host_adapter.hpp>
#define ERROR_BUF_SIZE 1024
static char error_buf[ERROR_BUF_SIZE];
extern "C" const char* get_last_error() { return error_buf; }
extern "C" int init() { return 0; }
extern "C" int call(float* q, float* k, float* v, float* o, float* kv, float* z, int64_t* slots, int use_slots,
                    int blocks, int shared_bytes, int H, int heads, int K, int V, int64_t kv_row, int64_t kv_head,
                    int64_t z_row, int64_t z_head, int feature_map, int normalize, float scale, float eps,
                    cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(256);
  config.dynamicSmemBytes = shared_bytes;
  const long long* rows = use_slots ? (const long long*)slots : nullptr;
  cudaLaunchKernelEx(&config, linear_attention_decode, q, k, v, o, kv, z, rows, H, heads, K, V, kv_row, kv_head,
                     z_row, z_head, feature_map, normalize, scale, eps);
  TILELANG_CHECK_LAST_ERROR("linear_attention_decode");
  return 0;
}
"""


@cache
def built(source=arrays_decode.SOURCE):
    if tools().missing:
        pytest.skip(tools().missing)
    flat = [(n, "int64" if n == "slots" else "float32", "int64_t*" if n == "slots" else "float*") for n in POINTERS]
    parameters = (
        *(Parameter(n, "tensor", d, c, (f"{n}_size",), (1,), n in WRITTEN) for n, d, c in flat),
        *(Parameter(n, "scalar", {"int": "int32", "int64_t": "int64"}.get(c, c), c) for n, c in NUMBERS.items()),
    )
    lowered = Lowered(arrays_decode.KERNEL, "sm_80", source, source + HOST, parameters, ())
    return Emulated(lowered, cache=Path(os.environ["LINATTN_TL_CACHE_DIR"]) / "emulator")


class Kernel:
    """In place of a compiled RawKernel: called with addresses, as that is, and run by the emulator."""

    def __init__(self, source=arrays_decode.SOURCE):
        self.emulated, self.reports, self.clean = built(source), [], True

    def __call__(self, grid, block, args, *, shared_mem):
        kinds = [type(x) for x in args]
        assert kinds == [np.uint64] * 7 + [np.int32] * 4 + [np.int64] * 4 + [np.int32] * 2 + [np.float32] * 2
        assert block == (256,)
        pointers, numbers = [int(x) for x in args[:7]], [x.item() for x in args[7:]]
        H, heads, K, V, kv_row, kv_head, z_row, z_head = numbers[:8]
        B, HV = grid[0] // H, H * heads
        slots = memory(pointers[6], B, np.int64) if pointers[6] else np.arange(B)
        rows = int(slots.max()) + 1
        sizes = {"q": B * H * K, "k": B * H * K, "v": B * HV * V, "o": B * HV * V}
        sizes["kv"] = (rows - 1) * kv_row + (HV - 1) * kv_head + K * V if rows else 0
        sizes["z"] = (rows - 1) * z_row + (H - 1) * z_head + K if rows else 0
        tensors = [memory(p, sizes[n], np.float32) for p, n in zip(pointers, POINTERS[:6], strict=False)]
        report = self.emulated.check(*tensors, slots, int(pointers[6] != 0), grid[0], shared_mem, *numbers)
        if self.clean:
            report.assert_clean()
        self.reports.append(report)


def memory(address, count, dtype):
    kind = np.ctypeslib.as_ctypes_type(dtype)
    return np.ctypeslib.as_array((kind * count).from_address(address)) if count else np.empty(0, dtype)


class EmulatedArrays(arrays.Arrays):
    def kernel(self, source, name):
        assert f"{name}(" in source
        return Kernel(source)


@pytest.fixture
def kernel(monkeypatch):
    """Calls that name the cupy backend run the kernel where it fits."""
    runner = ArrayDecode(EmulatedArrays())
    usual = registry.choose

    def choose(op, problem, backend="auto"):
        return registry.Choice("cupy", runner) if backend == "cupy" else usual(op, problem, backend)

    monkeypatch.setattr(registry, "choose", choose)
    return runner.kernel


CASES = [c for c in SUBJECT.cases if c.V % 4 == 0 and c.T <= arrays_decode.MAX_TOKENS]


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_equals_the_definition_and_is_clean(kernel, case):
    conformance.check(SUBJECT, case, "cupy")
    launched = case.dtype != "float64" and case.B * case.T > 0 and case.layout != "column"
    assert len(kernel.reports) == (case.T if launched else 0)


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize(
    ("K", "V", "HV"), [(128, 128, 1), (3, 4, 1), (40, 8, 3), (17, 72, 2), (300, 64, 1), (1, 1024, 1), (70, 520, 1)]
)
def test_head_dims(kernel, K, V, HV):
    """Groups of one row and of many, rows that do not fill the last round, threads with no row."""
    conformance.check(SUBJECT, Case(f"K{K}-V{V}", B=2, T=1, H=1, HV=HV, K=K, V=V), "cupy")
    assert len(kernel.reports) == 1


def example(B=2, n=1, H=2, HV=4, K=16, V=24, P=2):
    tokens = [torch.randn(B, n, H, K), torch.randn(B, n, H, K), torch.randn(B, n, HV, V)]
    return *tokens, torch.randn(P, HV, K, V), torch.rand(P, H, K) + 1


def test_a_pool_of_padded_rows(kernel):
    """Rows and heads apart in memory, with what lies between them left alone."""
    q, k, v, kv, z = example(P=3)
    wide, wide_z = torch.full((3, 5, 16, 24), 7.0), torch.full((3, 2, 20), 7.0)
    pool, pool_z = wide[:, :4], wide_z[..., :16]
    pool.copy_(kv), pool_z.copy_(z)
    slots = torch.tensor([2, 0], dtype=torch.int32)
    runner = ArrayDecode(EmulatedArrays())
    o = runner(q, k, v, pool, pool_z, slots, OPTIONS, torch.empty_like(v))
    want = decode(q.double(), k.double(), v.double(), kv := kv.double(), z := z.double(), slots, OPTIONS, v.double())
    for x, y in ((o, want), (pool, kv), (pool_z, z)):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
    assert len(runner.kernel.reports) == 1
    assert (wide[:, 4] == 7).all() and (wide_z[..., 16:] == 7).all()


def test_what_does_not_fit_goes_the_other_way():
    q, _, v, kv, z = example()
    assert arrays_decode.fits(q, v, kv, z)
    many = torch.empty(1, 9, 2, 16)
    assert not arrays_decode.fits(many, v, kv, z)
    odd = torch.empty(2, 4, 16, 22)
    assert not arrays_decode.fits(q, v[..., :22], odd, z)
    assert not arrays_decode.fits(q, v, kv.double(), z)
    shifted = torch.empty(kv.numel() + 1)[1:].view_as(kv)
    assert not arrays_decode.fits(q, v, shifted, z), "not aligned to 16 bytes"
    assert not arrays_decode.fits(q, v, kv.mT.contiguous().mT, z)
    assert not arrays_decode.fits(q, v, kv, z.mT.contiguous().mT)
    assert not arrays_decode.fits(q[..., :0], v, kv[:, :, :0], z[..., :0])


def test_keeps_nan_in_its_row(kernel):
    test_non_finite.test_decode_keeps_it_in_its_row("cupy")
    assert kernel.reports


@pytest.mark.parametrize("n", [None, 7])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_may_be_an_input(kernel, name, n):
    test_bad_input.test_an_out_that_is_an_input_is_right_or_refused("cupy", name, n)
    assert kernel.reports


def test_moves_the_state_once_in_words_of_16_bytes(kernel):
    """D = 128: the state is read and written once, in full sectors, and nothing else is worth counting."""
    q, k, v, kv, z = example(B=1, H=2, HV=2, K=128, V=128, P=1)
    ArrayDecode(EmulatedArrays())  # the kernel is built once
    arrays_decode.launch(kernel, q, k, v, kv, z, None, OPTIONS, torch.empty_like(v))
    (report,) = kernel.reports
    state = kv.nbytes
    moved = {b.name: (b.read, b.written) for b in report.buffers}
    assert moved["kv"] == (state, state) and moved["z"] == (z.nbytes, z.nbytes)
    total = report.counters.total
    assert total.sectors == total.ideal_sectors
    assert report.counters.global_bytes == report.counters.unique_bytes + 7 * v.nbytes, "v once a group"
    (load,) = [s for s in report.sites if "s[u] = state" in s.place.text]
    assert load.global_read == 16 * 32 * load.global_requests, "a warp's request is 32 words of 16 bytes"
    assert total.conflict_degree <= 1.0


@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_emulator_sees_a_missing_barrier(which):
    """Each of the kernel's three: the features, the partial sums, and their use for the next head."""
    parts = arrays_decode.SOURCE.split("__syncthreads();")
    source = "".join(p + (("__syncthreads();" if i != which else "") if i < 3 else "") for i, p in enumerate(parts))
    kernel = Kernel(source)
    kernel.clean = False
    q, k, v, kv, z = example()
    arrays_decode.launch(kernel, q, k, v, kv, z, None, OPTIONS, torch.empty_like(v))
    assert {f.kind for f in kernel.reports[0].findings} & {"race", "uninitialised"}


@pytest.mark.gpu
def test_on_a_device():
    pytest.importorskip("cupy")
    for case in CASES:
        if case.layout == "contiguous" and not case.single and not callable(case.keywords.get("feature_map")):
            check_on_a_device(case)


def check_on_a_device(case):
    t = SUBJECT.inputs(case)
    slots = None if case.slots is None else torch.tensor(case.slots).cuda()
    keywords = {**case.keywords}
    if keywords.get("scale", 1.0) is None:
        keywords["scale"] = case.K**-0.5
    kv, z = t["kv"].cuda(), t["z"].cuda()
    tokens = [t[n].cuda() for n in "qkv"]
    out = torch.full_like(tokens[2], float("nan"))
    ArrayDecode(arrays.CUPY)(*tokens, kv, z, slots, OPTIONS._replace(**keywords), out)
    exact = SUBJECT.truth({n: x.double() for n, x in t.items()}, case)
    for name, x in {"o": out, "kv": kv, "z": z}.items():
        conformance.check_close(name, x.cpu(), exact[name])
