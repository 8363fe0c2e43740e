"""The CUDA launcher: the host code of a binary, generated, and packing a call into one block of words.

The host code is TileLang's own `call(...)`, which computes grids, tensor maps and the order of the kernels' parameters.
It is text against the CUDA runtime's API. g++ compiles it against cuda.h beside this file, which maps the few names in
it onto driver functions found by dlsym at the first call. So what launches on a GPU is the very wrapper that the
emulator has executed, and an object needs libc alone. TileLang's other host code, for tvm-ffi, would do as well, at
0.9 us a call and with tvm-ffi at run time; a plain C entry that ctypes calls with one block of words needs neither.

Two things of the wrapper are not kept. It sets the dynamic shared memory by itself, for one device; here that is done
when the kernels are loaded on a device. And it lets each kernel start before the one in front of it has ended
(programmatic dependent launch), which is wrong for a kernel that does not wait for the other's results; here only
kernels that wait do so.

The block's layout is stated in cuda.h.
"""

import ctypes
import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

HEADER = Path(__file__).with_name("cuda.h")
DRIVER_HEADER = Path(__file__).with_name("cuda_driver.h")
ENTRY = "linattn_launch"
MINIMUM_DRIVER = {12: 525, 13: 580}  # the first driver of each CUDA generation, which loads code of all its releases
_FLOATS = frozenset({"float", "double"})
# What the wrapper may call; anything else (clusters, cooperative launches, L2 windows) has no counterpart in cuda.h.
_RUNTIME = {
    "cudaLaunchAttribute",
    "cudaLaunchAttributeProgrammaticStreamSerialization",
    "cudaLaunchConfig_t",
    "cudaLaunchKernelEx",
    "cudaStreamDefault",
    "cudaStream_t",
    "cuTensorMapEncodeTiled",
}


class LauncherError(ValueError):
    """TileLang's host code asks for something that the launcher has not got."""


@dataclass(frozen=True)
class KernelFunction:
    """One `__global__` function of an emitted source."""

    name: str
    parameters: str  # as in its declaration, less what g++ does not know
    threads: int
    shared_bytes: int  # dynamic
    waits_for_earlier: bool


def read_functions(source: str) -> list[KernelFunction]:
    """The kernels of an emitted source, device code and host wrapper, in its order."""
    found = []
    pattern = r'extern "C" __global__ void __launch_bounds__\((\d+)[^)]*\) (\w+)\(([^)]*)\) \{'
    device, wrapper = _split(source)
    matches = list(re.finditer(pattern, device))
    ends = [*(match.start() for match in matches[1:]), len(device)]
    for match, end in zip(matches, ends, strict=False):  # none of the one, one of the other
        threads, name, parameters = match.groups()
        body = device[match.end() : end]
        shared = re.search(rf"cudaFuncSetAttribute\({name}, \w+MaxDynamicSharedMemorySize, (\d+)\)", wrapper)
        waits = re.search(r"\bcudaGridDependencySynchronize\s*\(|griddepcontrol\.wait", body) is not None
        parameters = parameters.replace("__grid_constant__ ", "").replace(" __restrict__", "")
        found.append(KernelFunction(name, parameters, int(threads), int(shared[1]) if shared else 0, waits))
    if not found:
        raise LauncherError("the emitted source has no kernel with launch bounds")
    return found


def _split(source: str) -> tuple[str, str]:
    """The device code, and the host wrapper."""
    at = source.find("#define ERROR_BUF_SIZE")
    if at < 0:
        raise LauncherError("the emitted source has no host wrapper")
    return source[:at], source[at:]


def _host_code(source: str) -> str:
    """TileLang's `call(...)` alone."""
    wrapper = _split(source)[1]
    at = wrapper.index('extern "C" TL_EXPORT int call(')
    code = wrapper[at:].replace('extern "C" TL_EXPORT int call(', "static int call(", 1)
    code = code.replace(" __restrict__", "")  # it would be part of the arguments' types
    unknown = set(re.findall(r"\bcuda[A-Z]\w*|\bcuTensorMapEncode\w+", code)) - _RUNTIME
    if unknown:
        raise LauncherError(f"the host code uses {', '.join(sorted(unknown))}, which the launcher has not got")
    return code


@dataclass(frozen=True)
class About:
    """What a binary is, for its messages and for the Python that calls it."""

    kernel: str
    arch: str
    cuda: int  # of the compiler: 13000 is CUDA 13.0
    tensors: tuple[str, ...]  # in the order of the block
    numbers: tuple[tuple[str, str], ...]  # (name, C type) of scalars, then dynamic sizes
    whole: bool = False  # as in Kernel

    @property
    def minimum_cuda(self) -> int:
        return self.cuda // 1000 * 1000

    @property
    def minimum_driver(self) -> int:
        """Raises LauncherError for a generation of CUDA whose drivers are not known."""
        if self.cuda // 1000 not in MINIMUM_DRIVER:
            known = ", ".join(map(str, MINIMUM_DRIVER))
            raise LauncherError(f"CUDA {self.cuda // 1000} is the compiler's; drivers are known for {known}")
        return MINIMUM_DRIVER[self.cuda // 1000]


def glue(about: About, source: str, arguments: Sequence[tuple[str, str]], sizes: Mapping[str, Sequence[int]]) -> str:
    """The C++ of a binary. The image is expected in `kernel.image` on the assembler's path.

    Args:
        about: names and versions; every argument is in its tensors or numbers.
        source: what TileLang emitted, device code and host wrapper.
        arguments: (name, C type) of what `call` takes before the stream, in order.
        sizes: bytes of each parameter of each kernel in the compiled code; checked against the declarations.

    Raises:
        LauncherError: the host code needs something that the launcher has not got.
    """
    functions = read_functions(source)
    table = ", ".join(f'{{"{f.name}", {f.shared_bytes}, {str(f.waits_for_earlier).lower()}}}' for f in functions)
    digits, exact = re.fullmatch(r"sm_(\d+)(a?)", about.arch).groups()  # type: ignore[union-attr]
    binary = (
        f'{{"{about.kernel}", "{about.arch}", {digits}, {str(bool(exact)).lower()}, {about.cuda}, '
        f"{about.minimum_cuda}, {about.minimum_driver}}}"
    )
    declarations = "\n".join(f"void {f.name}({f.parameters});" for f in functions)
    indices = ", ".join(f"FUNCTION_{f.name}" for f in functions)
    checks = "\n".join(
        f"static_assert(linattn::has_sizes((decltype(&{f.name})) nullptr, {{{', '.join(map(str, sizes[f.name]))}}}), "
        f'"{f.name}: the compiled code has other parameters");'
        for f in functions
        if sizes.get(f.name)
    )
    public = {"kernel": about.kernel, "arch": about.arch, "tensors": about.tensors, "numbers": about.numbers}
    return f"""\
#define LINATTN_BINARY {binary}
#define LINATTN_FUNCTIONS {table}
#include "cuda.h"
__asm__(".section .rodata\\n.balign 64\\n.globl linattn_image, linattn_image_end\\n"
        ".type linattn_image, @object\\n.type linattn_image_end, @object\\n"
        "linattn_image: .incbin \\"kernel.image\\"\\nlinattn_image_end: .byte 0\\n"
        ".size linattn_image, linattn_image_end - linattn_image\\n.size linattn_image_end, 1\\n.previous");
namespace {{
{declarations}
enum {{ {indices} }};
{checks}
}}
{_host_code(source)}
#define LINATTN_EXPORT extern "C" __attribute__((visibility("default")))
LINATTN_EXPORT int64_t {ENTRY}(const int64_t* block) {{
{_checks(about)}
  linattn::Launch launch;
  if (int status = launch.enter(block[0], block[1])) return status;
  return launch.leave(call({_arguments(about, arguments)}, &launch));
}}
LINATTN_EXPORT int64_t linattn_preload(int64_t device) {{ return linattn::preload(device); }}
LINATTN_EXPORT const char* linattn_error() {{ return linattn::error; }}
LINATTN_EXPORT const char* linattn_about() {{ return {json.dumps(json.dumps(public))}; }}
LINATTN_EXPORT int64_t linattn_use_driver(const char* path) {{ return linattn::use_driver(path); }}
{'#include "repeat.h"' if about.whole else ""}
"""


def _words(about: About) -> dict[str, int]:
    """Where each argument is in the block."""
    names = [*about.tensors, *(name for name, _ in about.numbers)]
    return {name: 2 + i for i, name in enumerate(names)}


def _checks(about: About) -> str:
    words = _words(about)
    lines = []
    for name in about.tensors:
        word = f"block[{words[name]}]"
        lines.append(f'  if (linattn::misaligned({word})) return linattn::fail_address("{name}", {word});')
    for name, c_type in about.numbers:
        word = f"block[{words[name]}]"
        if c_type not in _FLOATS:
            lines.append(f'  if (!linattn::fits<{c_type}>({word})) return linattn::fail_number("{name}", {word});')
    return "\n".join(lines)


def _arguments(about: About, arguments: Sequence[tuple[str, str]]) -> str:
    words = _words(about)
    filled = []
    for name, c_type in arguments:
        word = f"block[{words[name]}]"
        filled.append(f"({c_type})linattn::as_double({word})" if c_type in _FLOATS else f"({c_type}){word}")
    return ", ".join(filled)


class CudaBinary:
    """A loaded CUDA binary. Loading needs no driver and no GPU.

    A call is addresses(...), which change every time, and fixed(...), which a caller may keep for calls of the same
    sizes and options, in `kept`: binary(binary.addresses(device, stream, *tensors) + binary.fixed(*numbers)).

    device is the index of the device the tensors are on; stream is a handle, such as torch.cuda.Stream.cuda_stream, or
    0 for the default one. tensors are addresses (0 for one that the kernel will not touch), each a multiple of 16, in
    the order of `tensors`; numbers are in that of `numbers`: scalars, then dynamic sizes.

    Launching is asynchronous. Raises RuntimeError if there is no driver, it is too old, the device is not one that the
    binary was built for, or the driver refuses; ValueError if an argument cannot be passed. Both name the kernel.
    """

    def __init__(self, path: Path):
        library = ctypes.CDLL(str(path))
        # what a launcher calls without this class in between: 0, or a status for fail()
        self.entry: Callable[[bytes], int] = getattr(library, ENTRY)
        self.entry.argtypes = [ctypes.c_char_p]
        self.entry.restype = ctypes.c_int64
        self._library = library
        library.linattn_preload.argtypes = [ctypes.c_int64]
        library.linattn_preload.restype = ctypes.c_int64
        library.linattn_error.restype = library.linattn_about.restype = ctypes.c_char_p
        library.linattn_use_driver.argtypes = [ctypes.c_char_p]
        library.linattn_use_driver.restype = ctypes.c_int64
        about = json.loads(library.linattn_about())
        self.path, self.kernel, self.arch = path, about["kernel"], about["arch"]
        self.tensors: tuple[str, ...] = tuple(about["tensors"])
        self.numbers: tuple[str, ...] = tuple(name for name, _ in about["numbers"])
        codes = "".join("d" if c_type in _FLOATS else "q" for _, c_type in about["numbers"])
        self.addresses: Callable[..., bytes] = struct.Struct(f"={2 + len(self.tensors)}q").pack
        self.fixed: Callable[..., bytes] = struct.Struct(f"={codes}").pack
        self.kept: dict[Any, bytes] = {}  # fixed blocks by whatever key the caller finds unique

    def __call__(self, block: bytes) -> None:
        if status := self.entry(block):
            self.fail(status)

    def preload(self, device: int) -> None:
        """Load the kernels on a device, so that the first call does not: before capturing a graph, or to save time."""
        if status := self._library.linattn_preload(device):
            self.fail(status)

    def image(self) -> bytes:
        """The fat binary that the driver is given."""
        start = ctypes.addressof(ctypes.c_char.in_dll(self._library, "linattn_image"))
        end = ctypes.addressof(ctypes.c_char.in_dll(self._library, "linattn_image_end"))
        return ctypes.string_at(start, end - start)

    def use_driver(self, path: Path | None) -> None:
        """Use this library as the driver from now on, and load everything again; None is the real one. For tests."""
        if status := self._library.linattn_use_driver(None if path is None else str(path).encode()):
            self.fail(status)

    def fail(self, status: int) -> NoReturn:
        """Raise what the last call on this thread failed with."""
        text = self._library.linattn_error().decode(errors="replace")
        raise ValueError(text) if status == 2 else RuntimeError(text)
