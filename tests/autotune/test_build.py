"""Building: what names a binary, what is said when a tool is missing, and what is in the objects."""

import dataclasses
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune import build, target
from autotune.launcher import cpu as launcher
from autotune.launcher.cpu import CpuBinary
from autotune.store import Entry
from linattn_tl import loader, trials
from tl_kernels.linear_attention import cpu as kernels
from tl_kernels.spec import Kernel, Problem

PROBLEM = Problem("linear_attention", "float32", 64, 64)
V3, V4 = target.named("cpu-v3"), target.named("cpu-v4")
RUNNABLE = [t.arch for t in target.offered()]


def config(kernel: Kernel, at: int = 0, arch: str = "cpu-v4") -> object:
    return kernel.configs(PROBLEM, target.named(arch))[at]


def key(kernel: Kernel = kernels.FWD, at: int = 0, **changes: object) -> str:
    return build.binary_key(
        kernel,
        PROBLEM._replace(**{k: v for k, v in changes.items() if k in Problem._fields}),
        config(kernel, at),
        target.named(str(changes.get("arch", "cpu-v4"))),
        bool(changes.get("checked", True)),
    )


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Probes and hashes are done anew, in the test and after it."""
    cached = (build.tools, build.fingerprint)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


# ---- names


def test_every_part_names_another_binary():
    variants = [
        key(),
        key(at=1),
        key(kernels.BWD_Q),
        key(kernels.BWD_KV),
        key(kernels.DECODE),
        key(dtype="bfloat16"),
        key(dtype="float16"),
        key(arch="cpu-v3"),
        key(checked=False),
    ]
    assert len(set(variants)) == len(variants)


def test_every_number_of_a_config_counts():
    seen = {key()}
    for field in dataclasses.fields(kernels.Config):
        other = dataclasses.replace(kernels.Config(32, 4, 32), **{field.name: 99})
        seen.add(build.binary_key(kernels.FWD, PROBLEM, other, V4))
    assert len(seen) == 4


def test_head_dims_do_not_count():
    assert key() == key(K=16) == key(V=256) == key(K=1, V=3)


def test_the_device_model_does_not_count():
    """A binary of a level runs on every CPU that has it; what a model is fastest with is in its table."""
    other = dataclasses.replace(V4, name="another", cores=64)
    assert build.binary_key(kernels.FWD, PROBLEM, config(kernels.FWD), other) == key()


def test_the_name_follows_the_sources(monkeypatch: pytest.MonkeyPatch):
    before = key()
    monkeypatch.setattr(build, "fingerprint", lambda op: "another")
    assert key() != before


SHAPING = ("linear_attention/cpu.py", "linear_attention/__init__.py", "spec.py", "macros.py", "tile.h")


@pytest.mark.parametrize("name", SHAPING)
def test_every_source_of_a_family_is_in_its_fingerprint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: None
):
    shutil.copytree(build.ROOT / "tl_kernels", tmp_path / "tl_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    before = build.fingerprint("linear_attention")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    build.fingerprint.cache_clear()
    assert build.fingerprint("linear_attention") == before
    with (tmp_path / "tl_kernels" / name).open("a") as file:
        file.write("\n")
    build.fingerprint.cache_clear()
    assert build.fingerprint("linear_attention") != before


def test_launcher_and_flags_are_in_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: None):
    def changed(change: Callable[[pytest.MonkeyPatch], None]) -> str:
        with monkeypatch.context() as patch:
            change(patch)
            build.fingerprint.cache_clear()
            return build.fingerprint("linear_attention")

    other = tmp_path / "other"
    other.write_text("another")
    seen = [
        changed(lambda patch: None),
        changed(lambda patch: patch.setattr(launcher, "HEADER", other)),
        changed(lambda patch: patch.setattr(launcher, "__file__", str(other))),
        changed(lambda patch: patch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))),
    ]
    assert len(set(seen)) == len(seen)


def test_another_family_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: None):
    shutil.copytree(build.ROOT / "tl_kernels", tmp_path / "tl_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    before = build.fingerprint("linear_attention")
    (tmp_path / "tl_kernels" / "another").mkdir()
    (tmp_path / "tl_kernels" / "another" / "cpu.py").write_text("")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    build.fingerprint.cache_clear()
    assert build.fingerprint("linear_attention") == before


# ---- tools


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    from importlib import metadata

    def lookup(name: str) -> str:
        assert name == "tilelang"
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", lookup)


def test_without_tilelang_the_words_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch, forgetful: None):
    installed(monkeypatch, None)
    assert build.tools().missing == "tilelang is not installed (pip install 'linattn-tl[tune]')"


def test_another_tilelang_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch, forgetful: None):
    installed(monkeypatch, "0.9.9")
    assert build.tools().missing == f"tilelang 0.9.9 is installed; kernels are verified with {build.TILELANG}"


def test_without_a_compiler_the_words_say_so(monkeypatch: pytest.MonkeyPatch, forgetful: None, tmp_path: Path):
    installed(monkeypatch, build.TILELANG)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.tools().missing == "g++ is not on PATH"


def test_with_all_tools_nothing_is_missing(forgetful: None):
    tools = build.tools()
    assert tools.missing == ""
    assert Path(tools.compiler).name == "g++"
    assert re.fullmatch(r"\d+\.\d+\.\d+", tools.version)


def test_probing_imports_nothing_heavy():
    script = "import sys; from autotune import build; build.tools(); print({'torch', 'tilelang'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=build.ROOT)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("version", [None, "0.9.9"])
def test_a_build_without_tools_names_the_kernel_and_what_is_missing(
    version: str | None, monkeypatch: pytest.MonkeyPatch, forgetful: None, tmp_path: Path
):
    installed(monkeypatch, version)
    with pytest.raises(build.BuildError, match=r"^linear_attention\.chunk_fwd: tilelang .*is"):
        build.build(kernels.FWD, PROBLEM, config(kernels.FWD), V4, tmp_path / "out.so")
    assert not (tmp_path / "out.so").exists()


# ---- compiling


@pytest.mark.parametrize("arch", ["cpu-v3", "cpu-v4"])
def test_a_compiler_error_names_the_arch_and_the_first_error(arch: str, tmp_path: Path):
    source = '#warning "not this one"\nint first = undefined_one;\nint second = undefined_two;\n'
    with pytest.raises(build.BuildError) as failure:
        build.compile_source(source, target.named(arch), tmp_path / "out.so")
    assert re.fullmatch(rf"g\+\+ failed for {arch}: .*error: .*undefined_one.*", str(failure.value))
    assert not (tmp_path / "out.so").exists()


def test_a_compiler_that_dies_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: None):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "tools", lambda: build.Tools("", str(compiler), "0.0.0"))
    with pytest.raises(build.BuildError, match=r"^g\+\+ failed for cpu-v3: without a word$"):
        build.compile_source("", V3, tmp_path / "out.so")


# ---- the objects


@pytest.fixture(scope="module")
def objects(binaries: None) -> Callable[[Kernel, str], Entry]:
    """A stored binary, built if need be: of a level, whether this machine can run it or not.

    After `binaries`: a call is served by a lower level where the best one has not been built.
    """

    def stored(kernel: Kernel, arch: str) -> Entry:
        device, verify = target.named(arch), trials.find_kernel(kernel.name, "cpu")[0].trial.check
        return loader.build_and_store(kernel, PROBLEM, device, verify, config(kernel, arch=arch))

    return stored


@pytest.fixture(params=["cpu-v3", "cpu-v4"])
def forward(request: pytest.FixtureRequest, objects: Callable[[Kernel, str], Entry]) -> Entry:
    return objects(kernels.FWD, request.param)


def output_of(tool: str, *arguments: object) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not on PATH")
    return subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def instructions(path: Path) -> str:
    return output_of("objdump", "--disassemble", "--no-show-raw-insn", path)


def test_an_object_needs_the_c_library_alone(forward: Entry):
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output_of("readelf", "--dynamic", "--wide", forward.path))
    assert set(needed) <= {"libc.so.6", "libm.so.6", "libdl.so.2"}


def test_an_object_needs_no_torch_python_or_tile_compiler(forward: Entry):
    """R19: whatever it is linked to must be on every machine that has torch."""
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output_of("readelf", "--dynamic", "--wide", forward.path))
    assert needed
    assert set(needed) <= {"libc.so.6", "libm.so.6", "libdl.so.2", "libstdc++.so.6", "libgcc_s.so.1"}
    symbols = [line[16:] for line in output_of("nm", "--dynamic", forward.path).splitlines()]  # without addresses
    assert not re.search(r"c10|at::|torch|Py[A-Z_]|tvm|TVM|GOMP", "\n".join(symbols))


def test_an_object_exports_its_entries_alone(forward: Entry):
    symbols = output_of("nm", "--dynamic", "--defined-only", forward.path).split()
    assert sorted(symbols[2::3]) == ["linattn_keep", launcher.ENTRY, "linattn_table"]


def test_an_object_keeps_to_its_level(forward: Entry):
    code = instructions(forward.path)
    assert len(re.findall(r"\bvfn?m(add|sub)\w+ps\b", code)) > 50  # fused, and packed
    if forward.manifest["arch"] == "cpu-v3":
        assert "zmm" not in code
        assert not re.search(r"%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7]", code)  # the registers of AVX-512 without its width
    else:
        assert len(re.findall(r"vfmadd\w+ps .*%zmm", code)) > 50


def test_no_object_sets_flush_to_zero(forward: Entry):
    """crtfastmath, which -ffast-math links, has a constructor that sets it for the process.

    A launch sets it for its own time, see tests/test_process_flags.py.
    """
    assert "set_fast_math" not in output_of("nm", forward.path)


LOAD = """
import ctypes, sys
small = float(sys.argv[2])
before = small * float("0.5")
ctypes.CDLL(sys.argv[1])
print(before, small * float("0.5"), small + small)
"""


@pytest.mark.parametrize("arch", RUNNABLE)
def test_subnormals_survive_loading(arch: str, objects: Callable[[Kernel, str], Entry]):
    path = objects(kernels.FWD, arch).path
    command = [sys.executable, "-c", LOAD, str(path), "4e-320"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2e-320", "2e-320", "8e-320"]


@pytest.mark.parametrize("kernel", [kernels.FWD, kernels.DECODE], ids=lambda k: k.name)
@pytest.mark.parametrize("arch", RUNNABLE)
def test_every_level_computes_right_here(kernel: Kernel, arch: str, objects: Callable[[Kernel, str], Entry]):
    """The check before storing ran once, when the cache was cold; this one runs every time."""
    entry = objects(kernel, arch)
    compiled, _ = trials.find_kernel(kernel.name, "cpu")
    binary = CpuBinary(entry.path, kernel, config(kernel, arch=arch))
    compiled.trial.check(kernel, PROBLEM, binary)
    assert entry.manifest["verified"] == "executed against the float64 definition"


def test_a_manifest_says_how_it_was_made(forward: Entry):
    said = forward.manifest
    assert (said["kernel"], said["dtype"]) == ("linear_attention.chunk_fwd", "float32")
    assert said["config"] == vars(config(kernels.FWD, arch=said["arch"]))
    assert said["tilelang"] == build.TILELANG
    assert said["compiler"] == f"g++ {build.tools().version}"


def test_a_level_that_cannot_run_here_is_stored_with_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("LINATTN_TL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(target, "offered", lambda: (V3,))
    monkeypatch.setattr(build, "build", lambda *a: a[-1].write_bytes(b"x") and {"arch": a[-2].arch})

    def refuse(*_: object) -> None:
        raise AssertionError("executed")

    entry = loader.build_and_store(kernels.FWD, PROBLEM, V4, refuse, config(kernels.FWD))
    assert entry.manifest["verified"] == "not executed: built on a machine that cannot run it"
