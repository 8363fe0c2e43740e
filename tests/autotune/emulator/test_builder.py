"""Building generated source: the cache, what g++'s errors are turned into, the width of memory hooks."""

import re
import subprocess
from pathlib import Path

import pytest

from autotune import build as cpu_build
from autotune.emulator import builder
from autotune.emulator.errors import EmulatorError

SOURCE = """\
#include <tl_templates/cuda/copy.h>
#include <tl_templates/cuda/reduce.h>
extern "C" __global__ void k(float* __restrict__ A, half_t* __restrict__ H) {
  float4 v = *(float4*)(A + threadIdx.x * 4);
  v.x = v.y + v.z * v.w;
  *(float4*)(A + 1024 + threadIdx.x * 4) = v;
  uint4 h = *(uint4*)(H + threadIdx.x * 8);
  float2 f = __half22float2(((half2*)(&h.y))[0]);
  *(uint2*)(H + 4096 + threadIdx.x * 4) = make_uint2(h.x, __float_as_uint(f.x));
  H[8192 + threadIdx.x] = H[9000 + threadIdx.x];
  float sum = tl::AllReduce<tl::SumOp, 32, 1, 0, tl::NamedBarrier<32>>::run(f.y);
  A[4096] = sum;
}
extern "C" int call(float* A, half_t* H) {
  cudaLaunchConfig_t config{};
  cudaLaunchKernelEx(&config, k, A, H);
  return cudaGetLastError();
}
"""
INT4 = "tl::DataType::kInt4, tl::DataType::kInt4, tl::DataType::kInt32, 16, 8, 64, false, true"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if builder.tools().missing:
        pytest.skip(builder.tools().missing)
    return tmp_path_factory.mktemp("emulator")


@pytest.fixture(autouse=True)
def small_runtime(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here runs a kernel, and the runtime takes seconds to compile."""
    folder = cache / "small_runtime"
    folder.mkdir(exist_ok=True)
    (folder / "nothing.cpp").write_text("int nothing;\n")
    monkeypatch.setattr(builder, "RUNTIME", folder)


@pytest.fixture(scope="session")
def headers(cache: Path) -> Path:
    return builder._keep(cache / "headers" / builder._headers_key(), builder._make_headers)


def compile_kernel(source: str, headers: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [*builder._compiler(builder.KERNEL_FLAGS, headers), *flags, "-x", "c++", "-", "-o", "-"]
    return subprocess.run(
        command, input=builder.rewrite(source), capture_output=True, text=True, check=False, env={"LC_ALL": "C"}
    )


def errors_of(statement: str, headers: Path) -> str:
    code = f'#include <tl_templates/cuda/atomic.h>\nextern "C" __global__ void k(float* A, int n) {{\n{statement}\n}}\n'
    command = [*builder._compiler(builder.KERNEL_FLAGS, headers), "-include", builder.EVERYTHING, "-fsyntax-only"]
    text = f'# 1 "kernel.cu"\n{code}'
    done = subprocess.run(
        [*command, "-x", "c++", "-"], input=text, capture_output=True, text=True, check=False, env={"LC_ALL": "C"}
    )
    assert done.returncode
    return builder.explain(done.stderr, "kernel.cu", code)


def test_a_second_build_is_found(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = builder.build(SOURCE, cache)
    assert not first.cached and first.seconds > 0
    assert first.source.read_text() == SOURCE
    monkeypatch.setattr(builder, "_compile_kernel", None)  # it is not compiled again
    again = builder.build(SOURCE, cache)
    assert again.cached and again.seconds == 0
    assert (again.path, again.source) == (first.path, first.source)
    assert {path.name for path in first.path.parent.iterdir()} == {"kernel.cu", "kernel.so"}


def test_another_source_or_flag_is_another_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr(builder, "_keep", lambda folder, make: made.append(folder) or folder)
    builder.build(SOURCE, cache / "empty")
    builder.build(f"{SOURCE}\n", cache / "empty")
    monkeypatch.setattr(builder, "KERNEL_FLAGS", (*builder.KERNEL_FLAGS, "-O0"))
    builder.build(SOURCE, cache / "empty")
    kernels = [folder for folder in made if folder.parent.name == "kernels"]
    assert len(set(kernels)) == 3


def test_one_access_of_the_source_is_one_hook_of_its_width(headers: Path) -> None:
    done = compile_kernel(SOURCE, headers, "-S")
    assert done.returncode == 0, done.stderr
    kernel = done.stdout[done.stdout.index("\nk:") : done.stdout.index("\ncall:")]
    hooks = re.findall(r"call\s+__tsan_(\w+)", kernel)
    # of a copy from memory to memory, the write's hook comes first; both come before the copy
    assert hooks[:6] == ["read16", "write16", "read16", "write8", "write2", "read2"]
    assert hooks[-1] == "write4"  # A[4096]; those of the shuffles' records, on the stack, come in between


@pytest.mark.parametrize(
    ("statement", "missing"),
    [
        ("tl::cluster_sync();", "tl::cluster_sync"),
        ("A[0] = __activemask();", "__activemask"),
        ("fp8_e4_t x[4]; x[0] = n;", "fp8_e4_t"),
        ("Barrier* b = 0; b->arrive(1, 2u);", "Barrier::arrive(int, unsigned int)"),
        (
            f"tl::mma_sync<{INT4}>(A, A, A);",
            f"tl::mma_sync<{INT4}>",
        ),
    ],
)
def test_what_is_not_covered_is_named_with_its_line(statement: str, missing: str, headers: Path) -> None:
    said = errors_of(statement, headers)
    assert said == f"not covered: {missing} (line 3 of the generated source)"


def test_an_error_of_another_kind_is_quoted(headers: Path) -> None:
    said = errors_of("A[0] = 1 +;", headers)
    assert said.startswith("g++ does not compile line 3 of the generated source: error: expected")


def test_a_failed_build_leaves_a_log_and_nothing_else(cache: Path) -> None:
    source = SOURCE.replace("A[4096] = sum;", "tl::clc_try_cancel(A, A);")
    with pytest.raises(
        EmulatorError, match=r"not covered: tl::clc_try_cancel \(line 12 .*own words are in (\S+)"
    ) as caught:
        builder.build(source, cache)
    log = Path(str(caught.value).split(" are in ")[1])
    assert "clc_try_cancel" in log.read_text()
    with pytest.raises(EmulatorError):
        builder.build(source, cache)


def test_an_interrupted_build_is_not_taken_for_one(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        builder._keep(tmp_path / "a" / "key", fail)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["key.lock"]
    kept = builder._keep(tmp_path / "a" / "key", lambda folder: (folder / "whole").touch())
    assert (kept / "whole").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"missing": "g++ is not on PATH"}, "g\\+\\+ is not on PATH; the emulator needs g\\+\\+ 11"),
        ({"missing": "tilelang 0.1.99 is installed"}, f"tilelang 0.1.99 .* tilelang {re.escape(builder.TILELANG)}"),
        ({"version": "9.4.0"}, "g\\+\\+ 9.4.0 is on PATH"),
    ],
)
def test_a_missing_tool_is_named(changes: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = cpu_build.Tools(**{"missing": "", "compiler": "g++", "version": "12.2.0", **changes})
    monkeypatch.setattr(builder, "tools", lambda: found)
    with pytest.raises(EmulatorError, match=words):
        builder.check_machine()


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "aarch64"), ("win32", "AMD64")])
def test_another_machine_is_refused(system: str, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder.sys, "platform", system)
    monkeypatch.setattr(builder.platform, "machine", lambda: machine)
    with pytest.raises(EmulatorError, match="needs x86-64 Linux"):
        builder.check_machine()
