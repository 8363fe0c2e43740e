"""The CUDA toolkit's programs: where they are, and what they say of a kernel. No GPU and no driver is needed.

A toolkit on PATH or in /usr/local/cuda is used; where there is none, that of the nvidia-cuda-* Python packages.
"""

import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from autotune.build import BuildError

SYSTEM = Path("/usr/local/cuda/bin")
PACKAGES = {  # Python packages, from CUDA 13 on; what each program is in
    "nvcc": "nvidia-cuda-nvcc",
    "fatbinary": "nvidia-cuda-nvcc",
    "nvdisasm": "nvidia-cuda-nvdisasm",
    "cuobjdump": "nvidia-cuda-cuobjdump",
}
INSTALL = "pip install nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl"
NVCC_FLAGS = ("-cubin", "-O3", "-std=c++20", "-w", "-Xptxas", "-v")
SPARING_FLAGS = ("-Xptxas", "--register-usage-level=0")  # ptxas keeps fewer addresses and constants for later use
WATCHED = {  # instructions that say how a kernel works: first words of SASS mnemonics
    "HGMMA": "matrix products of a warpgroup (sm_90a)",
    "HMMA": "matrix products of a warp",
    "UTMALDG": "tiles copied in by TMA",
    "UTMASTG": "tiles copied out by TMA",
    "LDGSTS": "asynchronous copies into shared memory",
    "LDSM": "matrix loads from shared memory",
    "LDL": "loads of spilled registers or local arrays",
    "STL": "stores of spilled registers or local arrays",
    "ATOMG": "atomics in global memory",
    "RED": "atomics in global memory without a result",
    "REDG": "the same, from sm_90 on",
}


def find_program(name: str) -> str | None:
    """The path of one of the toolkit's programs, or None."""
    found = shutil.which(name) or shutil.which(name, path=str(SYSTEM))
    if found or name not in PACKAGES:
        return found
    try:
        files = metadata.files(PACKAGES[name]) or []
    except metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.name == name)
    return next((str(path) for path in paths if path.is_file()), None)


@dataclass(frozen=True)
class Toolkit:
    """What building for CUDA needs, or why it cannot be done: `missing` is "" when all is there."""

    missing: str
    nvcc: str = ""
    fatbinary: str = ""
    version: str = ""  # "13.0.88"

    @property
    def cuda(self) -> int:
        """As the driver counts: 13000 is CUDA 13.0."""
        major, minor = (int(number) for number in self.version.split(".")[:2])
        return 1000 * major + 10 * minor


@cache
def toolkit() -> Toolkit:
    """Probe the compiler once. Imports nothing heavy."""
    nvcc = find_program("nvcc")
    if nvcc is None:
        return Toolkit(f"there is no nvcc on PATH or in {SYSTEM}: install the CUDA toolkit, or {INSTALL}")
    fatbinary = _beside(nvcc, "fatbinary") or find_program("fatbinary")
    if fatbinary is None:
        return Toolkit(f"{nvcc} has no fatbinary beside it: install the CUDA toolkit, or {INSTALL}")
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"\bV(\d+\.\d+\.\d+)", said)
    if version is None:
        return Toolkit(f"{nvcc} does not say which version it is")
    return Toolkit("", nvcc, fatbinary, version[1])


def _beside(program: str, name: str) -> str | None:
    return shutil.which(name, path=str(Path(program).resolve().parent))


# ---- compiling


@dataclass(frozen=True)
class FunctionReport:
    """What ptxas says of one kernel. Bytes are of one thread, but shared memory is of a block."""

    registers: int
    stack_bytes: int = 0
    spill_bytes: int = 0  # stored and loaded
    static_smem_bytes: int = 0


@dataclass(frozen=True)
class Cubin:
    """Machine code of one architecture, and the compiler's report on each kernel in it."""

    data: bytes
    functions: dict[str, FunctionReport]

    @property
    def spill_bytes(self) -> int:
        return sum(f.spill_bytes for f in self.functions.values())


def compile_cubin(source: str, arch: str) -> Cubin:
    """nvcc on CUDA C++ that TileLang emitted. BuildError names the arch and the first error.

    What spills registers is compiled again with fewer values kept for later use; the one that spills less is it.
    """
    found = _compile(source, arch, NVCC_FLAGS)
    if not found.spill_bytes:
        return found
    return min(found, _compile(source, arch, (*NVCC_FLAGS, *SPARING_FLAGS)), key=lambda cubin: cubin.spill_bytes)


def _compile(source: str, arch: str, flags: Sequence[str]) -> Cubin:
    if toolkit().missing:
        raise BuildError(toolkit().missing)
    tilelang = _tilelang_folder()
    include = [tilelang / "src", tilelang / "3rdparty" / "cutlass" / "include"]
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        file.write_text(source)
        command = [toolkit().nvcc, *flags, f"-arch={arch}", *(f"-I{i}" for i in include), str(file)]
        said = _run([*command, "-o", str(out)], f"nvcc failed for {arch}")
        return Cubin(out.read_bytes(), parse_ptxas(said))


def pack_image(cubin: bytes, arch: str) -> bytes:
    """The cubin as a compressed fat binary, a third of its size, which the driver takes as well."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder, f"kernel.{arch}.cubin"), Path(folder, "kernel.fatbin")
        file.write_bytes(cubin)
        # the drivers that take CUDA 13's code know this compression; older compilers have an older one
        mode = ["--compress-mode=size"] if toolkit().cuda >= 13000 else ["--compress=true"]
        entry = f"--image3=kind=elf,sm={arch.removeprefix('sm_')},file={file}"
        _run([toolkit().fatbinary, "-64", *mode, entry, f"--create={out}"], f"fatbinary failed for {arch}")
        return out.read_bytes()


def _tilelang_folder() -> Path:
    import importlib.util

    spec = importlib.util.find_spec("tilelang")  # finds the package without importing it
    if spec is None or spec.origin is None:
        raise BuildError("tilelang is not installed (pip install 'linattn-tl[tune]')")
    return Path(spec.origin).parent


def _run(command: list[str], failure: str, folder: str | None = None) -> str:
    """What a program says, on both channels."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    said = done.stdout + done.stderr
    if done.returncode:
        lines = [line for line in said.splitlines() if "error" in line.lower()] or said.splitlines()
        raise BuildError(f"{failure}: {lines[0].strip()[:500] if lines else 'without a word'}")
    return said


# ---- reading reports


def parse_ptxas(text: str) -> dict[str, FunctionReport]:
    """The report of `ptxas -v`, by kernel; what functions that a kernel calls spill is the kernel's."""
    reports = {}
    parts = re.split(r"Compiling entry function '(\w+)'", text)
    for name, said in zip(parts[1::2], parts[2::2], strict=True):
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
        used = re.search(r"Used (\d+) registers", said)
        if not frames or used is None:
            raise BuildError(f"ptxas does not say what {name} uses")
        shared = re.search(r"Used .*?(\d+) bytes smem", said)
        stack = sum(int(frame[0]) for frame in frames)
        spills = sum(int(stores) + int(loads) for _, stores, loads in frames)
        reports[name] = FunctionReport(int(used[1]), stack, spills, int(shared[1]) if shared else 0)
    if not reports:
        raise BuildError("ptxas reports no kernel")
    return reports


def parameter_sizes(cubin: bytes) -> dict[str, list[int]]:
    """Bytes of each parameter of each kernel, in order, as the compiled code has them.

    They are in the sections .nv.info.<kernel>: attributes of a format byte, a kind byte and a 16-bit value, which for
    format 4 is the size of what follows. Kind 0x17 is a parameter: index, ordinal, offset, and its size above bit 18.
    """
    sizes: dict[str, list[int]] = {}
    for name, data in _elf_sections(cubin):
        if not name.startswith(".nv.info."):
            continue
        found: dict[int, int] = {}
        at = 0
        while at + 4 <= len(data):
            form, kind, value = struct.unpack_from("<BBH", data, at)
            at += 4
            if form == 4:
                if kind == 0x17:
                    _, ordinal, _, packed = struct.unpack_from("<IHHI", data, at)
                    found[ordinal] = packed >> 18
                at += value
        sizes[name.removeprefix(".nv.info.")] = [found[i] for i in sorted(found)]
    return sizes


def _elf_sections(data: bytes) -> list[tuple[str, bytes]]:
    if data[:5] != b"\x7fELF\x02":
        raise BuildError("the compiler's output is no 64-bit ELF file")
    (start,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    # name, type, offset and size of each section
    heads = [struct.unpack_from("<II16xQQ", data, start + i * size) for i in range(count)]
    strings = heads[names][2]
    sections = []
    for name, kind, offset, length in heads:
        end = data.index(b"\0", strings + name)
        no_bits = kind == 8
        sections.append((data[strings + name : end].decode(), b"" if no_bits else data[offset : offset + length]))
    return sections


# ---- machine code


def count_instructions(image: bytes) -> dict[str, int] | None:
    """How often each of WATCHED is in a cubin, or in the one that a fat binary holds; None without the programs.

    nvdisasm reads a cubin, and cuobjdump takes it out of a fat binary.
    """
    nvdisasm, cuobjdump = find_program("nvdisasm"), find_program("cuobjdump")
    packed = image[:4] != b"\x7fELF"
    if nvdisasm is None or (packed and cuobjdump is None):
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.fatbin" if packed else "kernel.cubin")
        file.write_bytes(image)
        if packed:
            _run([str(cuobjdump), "-xelf", "all", str(file)], "cuobjdump failed", folder)
            (file,) = Path(folder).glob("*.cubin")
        return parse_sass(_run([nvdisasm, "-c", str(file)], "nvdisasm failed"))


def parse_sass(text: str) -> dict[str, int]:
    """Counts of WATCHED in a disassembly: `/*0040*/  @!P0 HGMMA.64x128x16.F32.BF16 ...`, a line each."""
    counts = Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", text))
    return {name: counts[name] for name in WATCHED}
