"""What can be said of a stored binary without running it: whether it loads, launches and is made of what it should be.

A shared object is read here rather than by a program: who checks a wheel may have no binutils. Standard library only.
"""

import hashlib
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.launcher.cuda import MINIMUM_DRIVER
from autotune.target import CPU_ARCHS, SHARED_LIMIT

# The C library's parts. Anything else (libstdc++, libgcc_s, a CUDA library, torch) ties a binary to a machine.
LIBRARIES = frozenset(["libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2"])
MAX_REGISTERS = 255  # of a thread; this and the next two are the same for every arch of SHARED_LIMIT
BLOCK_REGISTERS = 65536  # of a block
MAX_THREADS = 1024  # of a block

_FIELDS = {"kernel": str, "dtype": str, "arch": str, "config": dict, "verified": str, "tilelang": str, "compiler": str}
_STORE_FIELDS = {"key": str, "size": int, "sha256": str}
_CUDA_FIELDS = {"static": dict, "functions": dict, "minimum_driver": int, "minimum_cuda": str, "image_bytes": int}
_FUNCTION_FIELDS: dict[str, type] = dict.fromkeys(
    ("registers", "threads", "smem_bytes", "static_smem_bytes", "spill_bytes"), int
)


def check(manifest: Mapping[str, Any], binary: bytes, expected: Sequence[str] = ()) -> list[str]:
    """Every complaint about a binary, in words; none if it is as it should be.

    Args:
        manifest: what the store keeps beside the binary.
        binary: the shared object.
        expected: instructions that must be in its machine code, as the kernel names them, `A|B` for either; CUDA only.
    """
    complaints = check_usable(manifest, binary)
    # a manifest without these numbers has been complained about
    return complaints if _wrong_fields(manifest) else [*complaints, *check_speed(manifest, expected)]


def check_usable(manifest: Mapping[str, Any], binary: bytes) -> list[str]:
    """Why the binary cannot be loaded, launched or trusted, wherever it is."""
    complaints = _wrong_fields(manifest)
    if not complaints:
        if len(binary) != manifest["size"] or hashlib.sha256(binary).hexdigest() != manifest["sha256"]:
            complaints.append(f"the binary's {len(binary)} bytes are not those that the manifest's sha256 is of")
        if _is_cuda(manifest):
            complaints += _check_launch(manifest)
    try:
        return [*complaints, *_check_object(read_shared_object(binary))]
    except ValueError as error:
        return [*complaints, str(error)]


def check_speed(manifest: Mapping[str, Any], expected: Sequence[str]) -> list[str]:
    """Why the binary is right but slower than it was meant to be. Of a manifest that check_usable has accepted."""
    if not _is_cuda(manifest):
        return []
    spills = {name: f["spill_bytes"] for name, f in manifest["functions"].items() if f["spill_bytes"]}
    complaints = [f"{name} spills {size} bytes of registers" for name, size in spills.items()]
    counts = manifest.get("instructions")
    if expected and counts is None:
        complaints.append(f"{', '.join(expected)} expected; no disassembler was there to count instructions")
    elif counts is not None:
        complaints += [
            f"no {name.replace('|', ' or ')} in the machine code; the kernel expects it"
            for name in expected
            if not any(counts.get(word) for word in name.split("|"))
        ]
    return complaints


def _is_cuda(manifest: Mapping[str, Any]) -> bool:
    return manifest["arch"] not in CPU_ARCHS


def _wrong_fields(manifest: Mapping[str, Any]) -> list[str]:
    complaints = _check_types("", manifest, {**_FIELDS, **_STORE_FIELDS})
    if complaints:
        return complaints
    if not _is_cuda(manifest):
        return []
    if manifest["arch"] not in SHARED_LIMIT:
        return [f"arch is {manifest['arch']!r}; expected one of {', '.join((*CPU_ARCHS, *SHARED_LIMIT))}"]
    complaints = _check_types("", manifest, _CUDA_FIELDS)
    if not complaints and not manifest["functions"]:
        complaints.append("functions is empty; expected the kernels of the binary")
    for name, function in () if complaints else manifest["functions"].items():
        complaints += _check_types(f"{name}: ", function, _FUNCTION_FIELDS)
    return complaints


def _check_types(where: str, found: Any, expected: Mapping[str, type]) -> list[str]:
    if not isinstance(found, Mapping):
        return [f"{where}{found!r} in the manifest; expected {', '.join(expected)}"]
    return [
        f"{where}{name} is {found.get(name)!r} in the manifest; expected {'text' if kind is str else kind.__name__}"
        for name, kind in expected.items()
        if type(found.get(name)) is not kind
    ]


def _check_launch(manifest: Mapping[str, Any]) -> list[str]:
    """What the driver would refuse: to load, or to launch."""
    arch, complaints = manifest["arch"], []
    if manifest["minimum_driver"] not in MINIMUM_DRIVER.values():
        known = ", ".join(map(str, MINIMUM_DRIVER.values()))
        complaints.append(f"minimum_driver is {manifest['minimum_driver']}; expected one of {known}")
    for name, f in manifest["functions"].items():
        shared = f["smem_bytes"] + f["static_smem_bytes"]
        if shared > SHARED_LIMIT[arch]:
            complaints.append(f"{name} needs {shared} bytes of shared memory; {arch} has {SHARED_LIMIT[arch]}")
        if not 0 < f["threads"] <= MAX_THREADS:
            complaints.append(f"{name} has {f['threads']} threads a block; expected 1 to {MAX_THREADS}")
        if f["registers"] > MAX_REGISTERS:
            complaints.append(f"{name} has {f['registers']} registers a thread; expected at most {MAX_REGISTERS}")
        taken = -(-f["registers"] // 8) * 8 * f["threads"]  # they are given out to a thread in eights
        if taken > BLOCK_REGISTERS:
            complaints.append(f"{name} takes {taken} registers a block; expected at most {BLOCK_REGISTERS}")
    return complaints


# ---- the shared object


@dataclass(frozen=True)
class SharedObject:
    """What a shared object asks of the machine that loads it."""

    needed: tuple[str, ...]  # libraries
    versions: tuple[tuple[str, str], ...]  # of them: ("libc.so.6", "GLIBC_2.14"), sorted
    unnamed: tuple[str, ...]  # symbols that must be found, in a library that is not said
    search_path: bool  # it says where to look for libraries
    executable_stack: bool

    @property
    def glibc(self) -> tuple[int, int]:
        """The oldest glibc that it loads with. Versions that are not numbered do not count; check names them."""
        numbered = (re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", version) for _, version in self.versions)
        return max(((int(n[1]), int(n[2])) for n in numbered if n), default=(2, 0))


def _check_object(found: SharedObject) -> list[str]:
    complaints = [f"needs {name}, which is no part of the C library" for name in found.needed if name not in LIBRARIES]
    complaints += [
        f"needs {version} of {library}, which no release of glibc promises"
        for library, version in found.versions
        if library in LIBRARIES and not re.fullmatch(r"GLIBC_\d+\.\d+(\.\d+)?", version)
    ]
    if found.unnamed:
        some = ", ".join(found.unnamed[:3]) + (", ..." if len(found.unnamed) > 3 else "")
        complaints.append(f"takes {some} from whatever is loaded; expected symbols of the C library only")
    if found.search_path:
        complaints.append("says in which folders to look for libraries")
    if found.executable_stack:
        complaints.append("asks for an executable stack, which newer C libraries refuse to a loaded object")
    return complaints


_DYNAMIC, _SYMBOLS, _VERSIONS_NEEDED, _SYMBOL_VERSIONS = 6, 11, 0x6FFFFFFE, 0x6FFFFFFF  # kinds of section
_NEEDED, _RPATH, _RUNPATH = 1, 15, 29  # kinds of dynamic entry
_STACK = 0x6474E551  # the segment that says what the stack may be


@dataclass(frozen=True)
class _Section:
    kind: int
    data: bytes
    link: int  # the section that its strings are in


def read_shared_object(data: bytes) -> SharedObject:
    """Raises ValueError for what is not a whole shared object for x86-64."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"starts with {data[:6]!r}; expected a 64-bit ELF file")
    try:
        kind, machine = struct.unpack_from("<HH", data, 0x10)
        if (kind, machine) != (3, 62):
            raise ValueError(
                f"is of ELF type {kind} for machine {machine}; expected 3, a shared object, for 62, x86-64"
            )
        sections = _sections(data)
        by_kind = {section.kind: section for section in sections}
        if _DYNAMIC not in by_kind or _SYMBOLS not in by_kind:
            raise ValueError("has no dynamic section or no dynamic symbols")
        dynamic = list(struct.iter_unpack("<qQ", by_kind[_DYNAMIC].data))
        names = sections[by_kind[_DYNAMIC].link].data
        return SharedObject(
            tuple(_string(names, value) for tag, value in dynamic if tag == _NEEDED),
            tuple(sorted(_needed_versions(sections, by_kind.get(_VERSIONS_NEEDED)))),
            tuple(_unnamed(sections, by_kind[_SYMBOLS], by_kind.get(_SYMBOL_VERSIONS))),
            any(tag in (_RPATH, _RUNPATH) for tag, _ in dynamic),
            _executable_stack(data),
        )
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"is an ELF file that ends early or is damaged: {error}") from None


def _sections(data: bytes) -> list[_Section]:
    (start,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    found = []
    for i in range(count):
        kind, offset, length, link = struct.unpack_from("<4xI16xQQI", data, start + i * size)
        found.append(_Section(kind, data[offset : offset + length], link))
    return found


def _string(table: bytes, at: int) -> str:
    end = table.find(b"\0", at)
    if end < 0:
        raise ValueError("has a name outside its table of names")
    return table[at:end].decode()


def _needed_versions(sections: Sequence[_Section], section: _Section | None) -> Iterator[tuple[str, str]]:
    """(library, version): a list of libraries, each with a list of versions, both linked by offsets."""
    if section is None:
        return
    data, names, at, more = section.data, sections[section.link].data, 0, 1
    while more:
        library, first, more = struct.unpack_from("<4xIII", data, at)
        version_at, another = at + first, 1
        while another:
            version, another = struct.unpack_from("<8xII", data, version_at)
            yield _string(names, library), _string(names, version)
            version_at += another
        at += more


def _unnamed(sections: Sequence[_Section], symbols: _Section, versions: _Section | None) -> Iterator[str]:
    """Undefined symbols that are neither weak nor of a version: what has one comes from the library it names."""
    names = sections[symbols.link].data
    count = len(symbols.data) // 24
    numbers = [0] * count if versions is None else struct.unpack_from(f"<{count}H", versions.data)
    for (name, info, section), number in zip(struct.iter_unpack("<IBxH16x", symbols.data), numbers, strict=True):
        if section == 0 and name and info >> 4 != 2 and number & 0x7FFF < 2:
            yield _string(names, name)


def _executable_stack(data: bytes) -> bool:
    """Whether it is asked for; as it is by an object that does not say."""
    (start,) = struct.unpack_from("<Q", data, 0x20)
    size, count = struct.unpack_from("<HH", data, 0x36)
    for i in range(count):
        kind, flags = struct.unpack_from("<II", data, start + i * size)
        if kind == _STACK:
            return bool(flags & 1)
    return True
