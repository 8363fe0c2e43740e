"""Building for GPUs without one: the toolkit's programs, what they say, what is in the objects, and their names."""

import dataclasses
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune import build, cuda_build, cuda_toolkit, target
from autotune.cuda_toolkit import Cubin, FunctionReport, Toolkit
from autotune.launcher.cuda import CudaBinary
from tests.autotune import cuda_programs
from tests.autotune.cuda_binaries import compiled
from tests.autotune.emulator import kernels
from tl_kernels.spec import Kernel, Problem

ARCHS = tuple(target.SHARED_LIMIT)
NO_TOOLKIT = cuda_build.missing()
needs_toolkit = pytest.mark.skipif(bool(NO_TOOLKIT), reason=NO_TOOLKIT)


@dataclass(frozen=True)
class Config:
    block: int


def affine(problem: Problem, config: Config) -> Any:
    return kernels.affine(problem.K, config.block)


AFFINE = Kernel("linear_attention.affine", affine, lambda problem, target: (Config(64), Config(32)))
PROBLEM = Problem("linear_attention", "float16", 128, 64, "cuda")
HOPPER = target.named("sm_90a")


@pytest.fixture
def forgetful() -> Iterator[None]:
    """The toolkit is looked for anew, and sources are hashed anew, in the test and after it."""
    cached = (cuda_toolkit.toolkit, cuda_build.fingerprint, build.fingerprint)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


# ---- finding the toolkit


def program(folder: Path, name: str, text: str = "exit 0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def installed(site: Path, package: str, *programs: Path) -> None:
    """As pip leaves a package that has these programs."""
    record = "".join(f"{path.relative_to(site)},,\n" for path in programs)
    folder = site / f"{package.replace('-', '_')}-13.0.88.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 13.0.88\n")
    (folder / "RECORD").write_text(record)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: None) -> Path:
    """A machine without a toolkit; its PATH is <tmp_path>/path, its site-packages are <tmp_path>/site."""
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(cuda_toolkit, "SYSTEM", tmp_path / "system")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    return tmp_path


def test_without_a_toolkit_the_words_say_how_to_get_one(nowhere: Path):
    found = cuda_toolkit.toolkit()
    assert found.missing == (
        f"there is no nvcc on PATH or in {nowhere}/system: install the CUDA toolkit, or pip install nvidia-cuda-nvcc "
        "nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl"
    )
    with pytest.raises(build.BuildError, match="there is no nvcc"):
        cuda_toolkit.compile_cubin("", "sm_90a")


def test_a_build_without_a_toolkit_names_the_kernel(nowhere: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_build, "tools", lambda: build.Tools(""))
    with pytest.raises(build.BuildError, match=r"^linear_attention\.affine: there is no nvcc"):
        build.build(AFFINE, PROBLEM, Config(64), HOPPER, nowhere / "out.so")
    assert not (nowhere / "out.so").exists()


def test_path_comes_before_the_system_and_packages_come_last(nowhere: Path):
    site = nowhere / "site"
    packaged = program(site / "nvidia" / "cu13" / "bin", "nvcc")
    installed(site, "nvidia-cuda-nvcc", packaged)
    assert cuda_toolkit.find_program("nvcc") == str(packaged)
    system = program(nowhere / "system", "nvcc")
    assert cuda_toolkit.find_program("nvcc") == str(system)
    on_path = program(nowhere / "path", "nvcc")
    assert cuda_toolkit.find_program("nvcc") == str(on_path)
    assert cuda_toolkit.find_program("nvdisasm") is None
    assert cuda_toolkit.find_program("something") is None


def test_a_package_without_its_program_is_as_none(nowhere: Path):
    """nvidia-cuda-nvcc-cu12 and the like have ptxas alone."""
    installed(nowhere / "site", "nvidia-cuda-nvcc")
    assert cuda_toolkit.find_program("nvcc") is None


def test_the_toolkit_of_packages_is_used(nowhere: Path):
    bin = nowhere / "site" / "nvidia" / "cu13" / "bin"
    nvcc = program(bin, "nvcc", "echo 'Cuda compilation tools, release 13.5, V13.5.37'")
    fatbinary = program(bin, "fatbinary")
    installed(nowhere / "site", "nvidia-cuda-nvcc", nvcc, fatbinary)
    found = cuda_toolkit.toolkit()
    assert found == Toolkit("", str(nvcc), str(fatbinary), "13.5.37")
    assert found.cuda == 13050


def test_a_compiler_that_is_not_whole_is_named(nowhere: Path):
    nvcc = program(nowhere / "path", "nvcc", "echo something else")
    assert cuda_toolkit.toolkit().missing.startswith(f"{nvcc} has no fatbinary beside it")
    cuda_toolkit.toolkit.cache_clear()
    program(nowhere / "path", "fatbinary")
    assert cuda_toolkit.toolkit().missing == f"{nvcc} does not say which version it is"


def test_probing_imports_nothing_heavy():
    script = (
        "import sys; from autotune import cuda_build; from autotune.launcher import cuda; cuda_build.missing(); "
        "print({'torch', 'tilelang', 'tvm_ffi'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=build.ROOT)
    assert done.stdout == "set()\n"


# ---- compiling


@needs_toolkit
def test_a_compiler_error_names_the_arch_and_the_first_error():
    with pytest.raises(build.BuildError) as failure:
        cuda_toolkit.compile_cubin("int first = undefined_one;\nint second = undefined_two;\n", "sm_90a")
    text = str(failure.value)
    assert text.startswith("nvcc failed for sm_90a: ")
    assert "undefined_one" in text and "undefined_two" not in text


def test_a_compiler_that_dies_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nvcc = program(tmp_path, "nvcc", "exit 3")
    monkeypatch.setattr(cuda_toolkit, "toolkit", lambda: Toolkit("", str(nvcc), str(nvcc), "13.0.88"))
    with pytest.raises(build.BuildError, match=r"^nvcc failed for sm_80: without a word$"):
        cuda_toolkit.compile_cubin("", "sm_80")
    with pytest.raises(build.BuildError, match=r"^fatbinary failed for sm_80: without a word$"):
        cuda_toolkit.pack_image(b"", "sm_80")


@pytest.mark.parametrize(
    ("usual", "sparing", "kept", "runs"), [(0, 8, 0, 1), (40, 8, 8, 2), (40, 0, 0, 2), (8, 40, 8, 2)]
)
def test_what_spills_is_compiled_again(usual: int, sparing: int, kept: int, runs: int, monkeypatch: pytest.MonkeyPatch):
    """And the one that spills less is kept; what does not spill is compiled once."""
    seen = []

    def found(source: str, arch: str, flags: Sequence[str]) -> Cubin:
        seen.append(set(cuda_toolkit.SPARING_FLAGS) <= set(flags))
        return Cubin(
            b"", {"first": FunctionReport(255, 0, sparing if seen[-1] else usual), "second": FunctionReport(8)}
        )

    monkeypatch.setattr(cuda_toolkit, "_compile", found)
    assert cuda_toolkit.compile_cubin("", "sm_90a").spill_bytes == kept
    assert seen == [False, True][:runs]


@needs_toolkit
def test_what_does_not_lower_is_named(tmp_path: Path):
    with pytest.raises(
        build.BuildError, match=r"^linear_attention\.x: program: TileLang does not lower it for sm_80: "
    ):
        cuda_build.build_function(
            kernels.tiles(128, None, (64, 64), 3), "sm_80", tmp_path / "out.so", "linear_attention.x"
        )
    with pytest.raises(build.BuildError, match=r"arch is 'sm_75'"):
        cuda_build.build_function(kernels.affine(128), "sm_75", tmp_path / "out.so")
    assert not list(tmp_path.iterdir())


def test_more_shared_memory_than_there_is_is_refused(tmp_path: Path):
    lowered, cubin = compiled("sm_90a", kernels.affine, 128)
    small = dataclasses.replace(lowered, source=lowered.source.replace("MemorySize, 16384", "MemorySize, 102400"))
    assert small.source != lowered.source
    with pytest.raises(build.BuildError, match=r"program_kernel needs 102400 bytes .*; sm_86 has 101376"):
        cuda_build.link(dataclasses.replace(small, arch="sm_86"), cubin, tmp_path / "out.so", "x")
    assert not (tmp_path / "out.so").exists()


# ---- reports

PTXAS = """
ptxas info    : 10 bytes gmem, 80 bytes cmem[4]
ptxas info    : Compiling entry function 'second_kernel' for 'sm_80'
ptxas info    : Function properties for second_kernel
    24 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 8 bytes cumulative stack size, 1056 bytes smem, 392 bytes cmem[0]
ptxas info    : Compile time = 282.720 ms
ptxas info    : Compiling entry function 'first_kernel' for 'sm_80'
ptxas info    : Function properties for called
    0 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Function properties for first_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 76 registers, used 1 barriers, 392 bytes cmem[0]
"""


def test_the_compilers_report_is_read():
    assert cuda_toolkit.parse_ptxas(PTXAS) == {
        "second_kernel": FunctionReport(255, 24, 20, 1056),
        "first_kernel": FunctionReport(76, 0, 8, 0),
    }


@pytest.mark.parametrize(
    ("text", "words"), [("", "reports no kernel"), (PTXAS.replace("Used", "Has"), "what second_kernel uses")]
)
def test_a_report_of_another_form_is_refused(text: str, words: str):
    with pytest.raises(build.BuildError, match=words):
        cuda_toolkit.parse_ptxas(text)


def test_parameters_are_read_from_the_compiled_code():
    _, cubin = compiled("sm_90a", kernels.affine, 128)
    assert cuda_toolkit.parameter_sizes(cubin.data) == {"program_kernel": [8, 8, 8, 4, 4, 4, 4]}
    _, cubin = compiled("sm_90a", kernels.gemm, 256, 128, 192, staged=True)
    assert cuda_toolkit.parameter_sizes(cubin.data) == {"program_kernel": [128, 128, 128]}
    _, cubin = compiled("sm_90a", cuda_programs.two_stages, 256)
    assert cuda_toolkit.parameter_sizes(cubin.data) == {"program_kernel": [8, 8, 4], "program_kernel_1": [8, 8, 4]}


def test_what_is_no_cubin_is_refused():
    with pytest.raises(build.BuildError, match="no 64-bit ELF file"):
        cuda_toolkit.parameter_sizes(b"something")


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0030*/              @!P0 EXIT ;
        /*0040*/              @P0  HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0050*/                   HGMMA.64x64x16.F32 R24, R4, gdesc[UR8] ;
        /*12a60*/             @!UP0 UTMALDG.4D [UR8], [UR4] ;
        /*12a70*/             @!PT LDS RZ, [RZ] ;
        /*12a80*/                  STL.64 [R1+0x8], R2 ;   /* LDL in a comment */
        /*12a90*/                  LDSM.16.M88.4 R8, [R8] ;
"""


def test_instructions_are_counted():
    found = cuda_toolkit.parse_sass(SASS)
    assert {name: n for name, n in found.items() if n} == {"HGMMA": 2, "UTMALDG": 1, "STL": 1, "LDSM": 1}
    assert found.keys() == cuda_toolkit.WATCHED.keys()


def test_a_disassembler_is_asked_where_there_is_one(nowhere: Path, monkeypatch: pytest.MonkeyPatch):
    cubin, packed = b"\x7fELF\x02 code", b"\x50\xed\x55\xba code"
    assert cuda_toolkit.count_instructions(cubin) is None
    text = nowhere / "text"
    text.write_text(SASS)
    program(nowhere / "path", "nvdisasm", f'[ -f "$2" ] && while read -r line; do echo "$line"; done < {text}')
    assert cuda_toolkit.count_instructions(cubin) == cuda_toolkit.parse_sass(SASS)
    assert cuda_toolkit.count_instructions(packed) is None
    program(nowhere / "path", "cuobjdump", ': > "kernel.1.sm_90a.cubin"')
    assert cuda_toolkit.count_instructions(packed) == cuda_toolkit.parse_sass(SASS)


def test_the_machine_code_holds_what_is_expected():
    """Where the toolkit has a disassembler."""
    _, cubin = compiled("sm_90a", kernels.gemm, 256, 128, 192, staged=True)
    found = cuda_toolkit.count_instructions(cubin.data)
    if found is None:
        pytest.skip("there is no nvdisasm")
    assert found["HGMMA"] and found["UTMALDG"] and found["UTMASTG"]
    assert not found["LDL"] and not found["STL"] and not found["HMMA"]


# ---- objects and manifests


@needs_toolkit
@pytest.mark.parametrize("arch", ARCHS)
def test_every_arch_is_built_and_described(arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lowered, cubin = compiled(arch, kernels.affine, 128)
    said = cuda_build.link(lowered, cubin, tmp_path / "out.so", "linear_attention.affine")
    binary = CudaBinary(tmp_path / "out.so")
    assert (binary.kernel, binary.arch) == ("linear_attention.affine", arch)
    major = cuda_toolkit.toolkit().cuda // 1000
    report = said["functions"]["program_kernel"]  # type: ignore[index]
    assert said["kernel"] == "linear_attention.affine"
    assert (said["arch"], said["threads"], said["smem_bytes"], said["spill_bytes"]) == (arch, 128, 16384, 0)
    assert 32 <= said["registers"] == report["registers"] <= 255  # type: ignore[operator]
    assert said["tilelang"] == build.TILELANG
    assert said["compiler"] == f"nvcc {cuda_toolkit.toolkit().version}, g++ {build.tools().version}"
    assert (said["minimum_cuda"], said["minimum_driver"]) == (f"{major}.0", {12: 525, 13: 580}[major])
    assert said["cubin_sha256"] == hashlib.sha256(cubin.data).hexdigest()
    assert said["source_sha256"] == hashlib.sha256(lowered.source.encode()).hexdigest()
    assert said["image_bytes"] == len(binary.image())
    size = (tmp_path / "out.so").stat().st_size
    with capsys.disabled():
        print(f" [{arch}: cubin {said['cubin_bytes']}, image {said['image_bytes']}, object {size}] ", end="")
    assert said["image_bytes"] < said["cubin_bytes"] / 2  # type: ignore[operator]
    assert size < said["image_bytes"] + 20_000  # type: ignore[operator]


@needs_toolkit
def test_a_kernel_of_a_family_is_built(tmp_path: Path):
    out = tmp_path / "out.so"
    said = build.build(AFFINE, PROBLEM, Config(32), HOPPER, out)
    assert (said["kernel"], said["dtype"], said["arch"]) == ("linear_attention.affine", "float16", "sm_90a")
    assert (said["static"], said["config"]) == ({"K": 128, "V": 64}, {"block": 32})
    assert said["smem_bytes"] == 8192
    assert float(said["seconds"]) > 0  # type: ignore[arg-type]
    binary = CudaBinary(out)
    assert (binary.tensors, binary.numbers) == (("X", "S", "Y"), ("limit", "scale", "B", "L"))


def test_a_manifest_sums_up_its_kernels(tmp_path: Path):
    lowered, cubin = compiled("sm_90a", cuda_programs.two_stages, 256)
    said = cuda_build.link(lowered, cubin, tmp_path / "out.so", "x")
    functions = said["functions"]
    assert list(functions) == ["program_kernel", "program_kernel_1"]  # type: ignore[call-overload]
    assert [f["threads"] for f in functions.values()] == [128, 64]  # type: ignore[attr-defined]
    assert [f["smem_bytes"] for f in functions.values()] == [1024, 4096]  # type: ignore[attr-defined]
    assert (said["threads"], said["smem_bytes"]) == (128, 4096)


@needs_toolkit
def test_an_object_is_the_same_every_time(tmp_path: Path):
    lowered, cubin = compiled("sm_90a", kernels.affine, 128)
    for name in ("a.so", "b.so"):
        cuda_build.link(lowered, cubin, tmp_path / name, "x")
    assert (tmp_path / "a.so").read_bytes() == (tmp_path / "b.so").read_bytes()


def test_a_compiler_error_of_the_host_code_is_passed_on(tmp_path: Path):
    lowered, cubin = compiled("sm_90a", kernels.affine, 128)
    broken = dataclasses.replace(lowered, source=lowered.source.replace("dim3((L + 63) / 64,", "dim3((M + 63) / 64,"))
    with pytest.raises(build.BuildError, match=r"^g\+\+ failed for sm_90a: .*'?M.* was not declared"):
        cuda_build.link(broken, cubin, tmp_path / "out.so", "x")
    assert not (tmp_path / "out.so").exists()


# ---- names


def key(at: Config | None = None, arch: str = "sm_90a", checked: bool = True, **changes: object) -> str:
    problem = PROBLEM._replace(**changes)  # type: ignore[arg-type]
    return build.binary_key(AFFINE, problem, at or Config(64), target.named(arch), checked)


def test_every_part_names_another_binary():
    """Head dims too: they shape the tiles."""
    variants = [
        key(),
        key(Config(32)),
        key(arch="sm_80"),
        key(checked=False),
        key(dtype="bfloat16"),
        key(K=64),
        key(V=1),
    ]
    assert len(set(variants)) == len(variants)


@pytest.mark.parametrize(
    ("name", "shapes_cpu", "shapes_cuda"),
    [
        ("linear_attention/cuda.py", False, True),
        ("linear_attention/cpu.py", True, False),
        ("linear_attention/__init__.py", True, True),
        ("macros.py", True, False),
        ("cuda_macros.py", False, True),
        ("linear_attention/cuda_decode.py", False, True),
        ("spec.py", True, True),
    ],
)
def test_a_change_for_one_device_leaves_the_binaries_of_the_other(
    name: str, shapes_cpu: bool, shapes_cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: None
):
    shutil.copytree(build.ROOT / "tl_kernels", tmp_path / "tl_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(build, "ROOT", tmp_path)
    both = (build.fingerprint, cuda_build.fingerprint)
    before = [f("linear_attention") for f in both]
    with (tmp_path / "tl_kernels" / name).open("a") as file:
        file.write("\n")
    for f in both:
        f.cache_clear()
    assert [f("linear_attention") != b for f, b in zip(both, before, strict=True)] == [shapes_cpu, shapes_cuda]


# ---- targets


def test_targets_have_their_shared_memory():
    assert target.named("sm_86").smem_bytes == 99 * 1024
    assert target.named("sm_86").device == "cuda"
    assert target.named("cpu-v3").smem_bytes == 0


@pytest.mark.parametrize(
    ("capability", "archs"),
    [
        ((7, 5), ()),
        ((8, 0), ("sm_80",)),
        ((8, 6), ("sm_86", "sm_80")),
        ((8, 9), ("sm_89", "sm_86", "sm_80")),
        ((9, 0), ("sm_90a",)),
        ((10, 0), ("sm_100a",)),
        ((10, 3), ()),
        ((12, 0), ("sm_120a",)),
        ((12, 1), ()),
    ],
)
def test_the_archs_that_a_device_runs(capability: tuple[int, int], archs: tuple[str, ...]):
    assert target.cuda_archs(*capability) == archs


def test_an_unknown_arch_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'sm_75'.*cpu-v4, cpu-v3, sm_80, .*sm_120a"):
        target.named("sm_75")
