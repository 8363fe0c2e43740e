"""Complaints about a binary that nobody has run: each fault has its own, and a good binary has none."""

import hashlib
import shutil
import struct
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from autotune import static_check
from autotune.static_check import check, check_usable, read_shared_object

# what cuda_build said of linear_attention.forward, bfloat16, K = V = 32, less what is not looked at
FORWARD: dict[str, Any] = {
    "kernel": "linear_attention.forward",
    "dtype": "bfloat16",
    "arch": "sm_90a",
    "static": {"K": 32, "V": 32},
    "config": {"C": 64, "BV": 32, "stages": 2, "threads": 128},
    "functions": {
        "forward_kernel_kernel": {
            "registers": 240, "smem_bytes": 39936, "spill_bytes": 0, "stack_bytes": 0, "static_smem_bytes": 1024,
            "threads": 256,
        }
    },
    "image_bytes": 15608,
    "instructions": {"HGMMA": 8, "HMMA": 8, "LDSM": 8, "UTMALDG": 9, "LDL": 0, "STL": 0, "UTMASTG": 0},
    "minimum_driver": 580,
    "minimum_cuda": "13.0",
    "tilelang": "0.1.15",
    "compiler": "nvcc 13.0.88, g++ 12.2.0",
    "verified": "emulated: clean, and against the float64 definition",
}  # fmt: skip
CPU = {
    "kernel": "linear_attention.decode",
    "dtype": "float32",
    "arch": "cpu-v3",
    "config": {"C": 4, "NR": 128},
    "tilelang": "0.1.15",
    "compiler": "g++ 12.2.0",
    "verified": "executed against the float64 definition",
}
PLAIN = "#include <string.h>\nint answer(const char* s) { return (int) strlen(s); }"


def compile_c(out: Path, source: str = PLAIN, *flags: str) -> bytes:
    """A shared object of a few lines of C."""
    command = ["gcc", "-shared", "-fPIC", "-fno-builtin", "-x", "c", "-", "-o", str(out), "-x", "none", *flags]
    subprocess.run(command, input=source, text=True, check=True)
    return out.read_bytes()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return compile_c(tmp_path_factory.mktemp("plain") / "plain.so")


def sealed(said: dict[str, Any], binary: bytes) -> dict[str, Any]:
    """A manifest as the store completes it."""
    return {**deepcopy(said), "key": "0" * 64, "size": len(binary), "sha256": hashlib.sha256(binary).hexdigest()}


def changed(said: dict[str, Any], **function: int) -> dict[str, Any]:
    """With other numbers of its one kernel."""
    new = deepcopy(said)
    new["functions"]["forward_kernel_kernel"].update(function)
    return new


# ---- manifests


@pytest.mark.parametrize("said", [FORWARD, CPU], ids=["cuda", "cpu"])
def test_a_good_binary(plain: bytes, said: dict[str, Any]):
    assert check(sealed(said, plain), plain) == []
    assert check(sealed(FORWARD, plain), plain, ("HGMMA", "UTMALDG")) == []


LIMITS = {  # the most a kernel may use, and one more
    "threads": (
        changed(FORWARD, threads=1024, registers=64),
        changed(FORWARD, threads=1056, registers=56),
        "1056 threads",
    ),
    "no threads": (changed(FORWARD, threads=32), changed(FORWARD, threads=0), "0 threads"),
    "registers": (changed(FORWARD, registers=255), changed(FORWARD, registers=256), "256 registers a thread"),
    "block": (
        changed(FORWARD, registers=128, threads=512),
        changed(FORWARD, registers=129, threads=512),  # handed out as 136
        f"{136 * 512} registers a block; expected at most 65536",
    ),
    "dynamic": (
        changed(FORWARD, smem_bytes=231424),  # 227 KB less 1024 bytes
        changed(FORWARD, smem_bytes=231425),
        "232449 bytes of shared memory; sm_90a has 232448",
    ),
    "static": (
        changed(FORWARD, smem_bytes=0, static_smem_bytes=232448),
        changed(FORWARD, smem_bytes=0, static_smem_bytes=232449),
        "232449 bytes of shared memory",
    ),
    "smaller": (
        changed({**FORWARD, "arch": "sm_86"}, smem_bytes=99 * 1024 - 1024),
        changed({**FORWARD, "arch": "sm_86"}, smem_bytes=99 * 1024),
        "102400 bytes of shared memory; sm_86 has 101376",
    ),
    "driver": ({**FORWARD, "minimum_driver": 525}, {**FORWARD, "minimum_driver": 570}, "minimum_driver is 570"),
    "spills": (FORWARD, changed(FORWARD, spill_bytes=8), "forward_kernel_kernel spills 8 bytes"),
}  # fmt: skip


@pytest.mark.parametrize(("good", "bad", "words"), LIMITS.values(), ids=LIMITS)
def test_limits(plain: bytes, good: dict[str, Any], bad: dict[str, Any], words: str):
    assert check(sealed(good, plain), plain) == []
    (complaint,) = check(sealed(bad, plain), plain)
    assert words in complaint
    if "spills" not in words:  # slow, and yet it launches
        assert check_usable(sealed(bad, plain), plain) == [complaint]
    else:
        assert check_usable(sealed(bad, plain), plain) == []


def test_each_kernel_of_a_binary_is_looked_at(plain: bytes):
    said = deepcopy(FORWARD)
    said["functions"]["second"] = {**said["functions"]["forward_kernel_kernel"], "registers": 300, "threads": 64}
    assert check(sealed(said, plain), plain) == ["second has 300 registers a thread; expected at most 255"]


def test_expected_instructions(plain: bytes):
    without = {**FORWARD, "instructions": {**FORWARD["instructions"], "HGMMA": 0}}
    (complaint,) = check(sealed(without, plain), plain, ("HGMMA", "UTMALDG"))
    assert complaint == "no HGMMA in the machine code; the kernel expects it"
    assert check_usable(sealed(without, plain), plain) == []
    (complaint,) = check(sealed(FORWARD, plain), plain, ("TCGEN05",))  # nobody counts it
    assert "no TCGEN05" in complaint
    assert check(sealed(without, plain), plain, ("HGMMA|HMMA",)) == [], "one of them will do"
    (complaint,) = check(sealed(without, plain), plain, ("HGMMA|TCGEN05",))
    assert complaint == "no HGMMA or TCGEN05 in the machine code; the kernel expects it"
    uncounted = {key: value for key, value in FORWARD.items() if key != "instructions"}
    (complaint,) = check(sealed(uncounted, plain), plain, ("HGMMA", "UTMALDG"))
    assert "HGMMA, UTMALDG expected; no disassembler" in complaint
    assert check(sealed(uncounted, plain), plain) == []
    assert check(sealed(CPU, plain), plain, ("HGMMA",)) == []  # not a CPU binary's


@pytest.mark.parametrize("said", [FORWARD, CPU], ids=["cuda", "cpu"])
def test_fields(plain: bytes, said: dict[str, Any]):
    for name in sealed(said, plain).keys() - {"instructions"}:
        manifest = sealed(said, plain)
        del manifest[name]
        (complaint,) = check(manifest, plain)
        assert complaint.startswith(f"{name} is None in the manifest; expected ")
    (complaint,) = check(sealed({**said, "config": [1]}, plain), plain)
    assert complaint == "config is [1] in the manifest; expected dict"


def test_fields_of_kernels(plain: bytes):
    for name in ("registers", "threads", "smem_bytes", "static_smem_bytes", "spill_bytes"):
        said = deepcopy(FORWARD)
        del said["functions"]["forward_kernel_kernel"][name]
        assert check(sealed(said, plain), plain) == [
            f"forward_kernel_kernel: {name} is None in the manifest; expected int"
        ]
    (complaint,) = check(sealed({**FORWARD, "functions": {"a": 1}}, plain), plain)
    assert complaint.startswith("a: 1 in the manifest; expected registers, ")
    assert check(sealed({**FORWARD, "functions": {}}, plain), plain) == [
        "functions is empty; expected the kernels of the binary"
    ]


def test_an_unknown_arch(plain: bytes):
    (complaint,) = check(sealed({**FORWARD, "arch": "sm_75"}, plain), plain)
    assert complaint.startswith("arch is 'sm_75'; expected one of cpu-v4, cpu-v3, sm_80")


def test_another_binary(plain: bytes, tmp_path: Path):
    other = bytearray(plain)
    other[-1] ^= 1  # in a table of sections that nothing reads
    (complaint,) = check(sealed(CPU, plain), bytes(other))
    assert "sha256" in complaint


# ---- shared objects


def test_against_readelf(plain: bytes, tmp_path: Path):
    """What binutils say of an object that needs several versions of two libraries."""
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is not on PATH")
    source = "#include <math.h>\n#include <stdlib.h>\n" + PLAIN
    source += "double f(double x) { return pow(x, drand48()); } void g(char* a, char* b) { memcpy(a, b, answer(b)); }"
    path = tmp_path / "two.so"
    found = read_shared_object(compile_c(path, source, "-lm"))
    said = subprocess.run([readelf, "-dVW", str(path)], capture_output=True, text=True, check=True).stdout
    assert all(f"Shared library: [{name}]" in said for name in found.needed)
    assert set(found.needed) == {"libm.so.6", "libc.so.6"} and said.count("(NEEDED)") == 2
    assert {library for library, _ in found.versions} == {"libm.so.6", "libc.so.6"}
    for library, version in found.versions:
        assert f"Name: {version} " in said.split(f"File: {library} ")[1].split("File: ")[0]
    assert said.count("Name: GLIBC_") == len(found.versions) > 2
    numbers = [tuple(map(int, v.removeprefix("GLIBC_").split("."))) for _, v in found.versions]
    assert found.glibc == max(numbers)[:2] > (2, 5)
    assert (found.unnamed, found.search_path, found.executable_stack) == ((), False, False)
    assert read_shared_object(plain).needed == ("libc.so.6",)


OBJECTS = {
    "C++": ("", ["-Wl,--no-as-needed", "-lstdc++"], "needs libstdc++.so.6, which is no part of the C library"),
    "torch": (
        "void _ZN3c105ErrorC1ESs(void); void f(void) { _ZN3c105ErrorC1ESs(); }",
        [],
        "takes _ZN3c105ErrorC1ESs from whatever is loaded",
    ),
    "rpath": ("", ["-Wl,-rpath,/opt/lib"], "says in which folders to look for libraries"),
    "stack": ("", ["-Wl,-z,execstack"], "asks for an executable stack"),
}


@pytest.mark.parametrize(("source", "flags", "words"), OBJECTS.values(), ids=OBJECTS)
def test_objects_that_depend_on_more(tmp_path: Path, source: str, flags: list[str], words: str):
    binary = compile_c(tmp_path / "bad.so", PLAIN + source, *flags)
    complaints = check_usable(sealed(CPU, binary), binary)
    assert len(complaints) == 1 and words in complaints[0], complaints


def test_a_weak_symbol_may_be_missing(tmp_path: Path):
    weak = "__attribute__((weak)) void maybe(void); void f(void) { if (maybe) maybe(); }"
    binary = compile_c(tmp_path / "weak.so", weak)
    assert check_usable(sealed(CPU, binary), binary) == []


def test_versions_without_a_number(plain: bytes):
    assert b"GLIBC_2.2.5\0" in plain
    odd = plain.replace(b"GLIBC_2.2.5\0", b"GLIBC_PRIV.\0")
    (complaint,) = check_usable(sealed(CPU, odd), odd)
    assert complaint == "needs GLIBC_PRIV. of libc.so.6, which no release of glibc promises"


NOT_OBJECTS = {
    "empty": lambda data: b"",
    "text": lambda data: b"#!/bin/sh\n",
    "half": lambda data: data[: len(data) // 2],
    "header": lambda data: data[:64],
    "short header": lambda data: data[:20],
    "32 bit": lambda data: data[:4] + b"\x01" + data[5:],
    "arm": lambda data: data[:18] + struct.pack("<H", 183) + data[20:],
    "executable": lambda data: data[:16] + struct.pack("<H", 2) + data[18:],
    "no sections": lambda data: data[:0x3C] + b"\0\0" + data[0x3E:],
}


@pytest.mark.parametrize("spoil", NOT_OBJECTS.values(), ids=NOT_OBJECTS)
def test_what_is_no_shared_object(plain: bytes, spoil: Any):
    binary = spoil(plain)
    with pytest.raises(ValueError):
        read_shared_object(binary)
    assert len(check(sealed(CPU, binary), binary)) == 1


def test_no_damage_is_fatal(plain: bytes):
    """A flipped byte anywhere gives complaints or none, and never another exception."""
    step = max(1, len(plain) // 3000)
    for at in range(0, len(plain), step):
        spoiled = plain[:at] + bytes([plain[at] ^ 0xFF]) + plain[at + 1 :]
        assert check(sealed(CPU, plain), spoiled)


def test_what_counts_as_the_c_library():
    assert {"libstdc++.so.6", "libgcc_s.so.1", "libcuda.so.1", "libc10.so"}.isdisjoint(static_check.LIBRARIES)
