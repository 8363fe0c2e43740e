"""A TileLang prim_func -> the CUDA C++ that TileLang emits for it, and what its host entry takes.

No CUDA toolkit is needed: code generation is TileLang's own, and its host wrapper is text. The wrapper's `call(...)`
computes the grid, the dynamic shared memory and the tensor maps, so the emulator need not know how.
"""

import re
import time
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from autotune.build import TILELANG
from autotune.emulator.errors import EmulatorError
from autotune.target import SHARED_LIMIT

Dim = int | str  # a number, a symbol's name, or an expression over symbols as Python writes it


@dataclass(frozen=True)
class Parameter:
    """One argument of the prim_func, in its order."""

    name: str
    kind: str  # "tensor" or "scalar"
    dtype: str  # as TileLang names it: float16, bool, float8_e4m3fn
    c_type: str  # in the signature of `call`: half_t*, int
    shape: tuple[Dim, ...] = ()
    strides: tuple[Dim, ...] = ()  # in elements
    written: bool = False  # some kernel takes it as a pointer to non-const, or stores through a tensor map of it
    atomic: bool = False  # some kernel updates it atomically: the order of the sums is not fixed


@dataclass(frozen=True)
class Symbol:
    """A dynamic size, passed to `call` after the parameters."""

    name: str
    c_type: str


@dataclass(frozen=True)
class Lowered:
    """Emitted code and the signature of its entry: `call(parameters..., symbols..., stream)`."""

    name: str
    arch: str
    kernel_source: str  # the device code alone
    source: str  # kernel_source, then TileLang's host wrapper; line numbers agree
    parameters: tuple[Parameter, ...]
    symbols: tuple[Symbol, ...]
    seconds: float = 0.0


def check_arch(arch: str) -> None:
    if arch not in SHARED_LIMIT:
        raise ValueError(f"arch is {arch!r}; the emulator knows {', '.join(SHARED_LIMIT)}")


def lower(func: Any, arch: str, pass_configs: dict[str, Any] | None = None) -> Lowered:
    """Emit the CUDA C++ of a prim_func for one architecture. Imports tilelang.

    Args:
        func: a `T.prim_func`. Of a function under `tilelang.jit`, `function.get_tir(...)` is one.
        arch: sm_80, sm_86, sm_89, sm_90a, sm_100a or sm_120a.
        pass_configs: TileLang's own, such as {"tl.disable_tma_lower": True}.

    Raises:
        TypeError: func is not a prim_func.
        ValueError: the architecture is unknown.
        EmulatorError: TileLang is missing, is another version, or does not lower the kernel.
    """
    check_arch(arch)
    _check_version()
    start = time.perf_counter()
    _check_prim_func(func)
    name = str(func.attrs["global_symbol"])
    passes = dict(pass_configs or {})
    try:
        kernel_source, source = _emit(func, arch, passes)
    except Exception as error:  # TileLang and TVM raise nearly every class there is
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise EmulatorError(f"{name}: TileLang does not lower it for {arch}: {lines[-1].strip()}") from error
    signature = call_signature(source)
    parameters = _parameters(func, dict(signature), source)
    symbols = tuple(Symbol(*argument) for argument in signature[len(parameters) :])
    return Lowered(name, arch, kernel_source, source, parameters, symbols, time.perf_counter() - start)


def _check_version() -> None:
    try:
        found = metadata.version("tilelang")
    except metadata.PackageNotFoundError:
        raise EmulatorError("tilelang is not installed (pip install 'linattn-tl[tune]')") from None
    if found != TILELANG:
        raise EmulatorError(f"tilelang {found} is installed; the emulator knows the code that {TILELANG} emits")


def _check_prim_func(func: Any) -> None:
    from tilelang import tvm

    if isinstance(func, tvm.tirx.PrimFunc):
        return
    hint = ""
    if hasattr(func, "get_tir"):
        hint = "; call .get_tir(...) of a function under tilelang.jit"
    elif hasattr(func, "prim_func"):
        hint = "; a compiled kernel holds one in .prim_func"
    elif callable(func):
        hint = "; call the function that makes it"
    raise TypeError(f"got {type(func).__name__}; expected a prim_func (tilelang.language.prim_func){hint}")


def _emit(func: Any, arch: str, passes: dict[str, Any]) -> tuple[str, str]:
    """The device code, and the device code with TileLang's host wrapper."""
    import tilelang
    from tilelang import tvm
    from tilelang.jit.adapter.wrapper import TLWrapper

    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    # The target must be current too: some lowering rules ask for it instead of reading their argument.
    with target, tvm.transform.PassContext(opt_level=3, config=passes):
        artifact = tilelang.lower(func, target=target)
    wrapper = TLWrapper(target)
    wrapper.assign_optimized_module(tvm.IRModule({func.attrs["global_symbol"]: func}))
    wrapper.assign_pass_configs(passes)
    wrapper.assign_host_module(artifact.host_mod)
    wrapper.assign_device_module(artifact.device_mod)
    return artifact.kernel_source, str(wrapper.wrap(artifact.kernel_source))


def _parameters(func: Any, c_types: dict[str, str], source: str) -> tuple[Parameter, ...]:
    from tilelang.jit.adapter.utils import pythonic_expr

    def dims(expressions: Any) -> tuple[Dim, ...]:
        words = [str(pythonic_expr(e)) for e in expressions]
        return tuple(int(w) if w.isdecimal() else w for w in words)

    written, atomic = written_names(source), atomic_names(source)
    found = []
    for variable in func.params:
        if variable in func.buffer_map:
            buffer = func.buffer_map[variable]
            name = str(buffer.data.name)
            shape, strides = dims(buffer.shape), dims(buffer.strides)
            dtype = str(buffer.dtype)
            known = (shape, strides, name in written, name in atomic)
            found.append(Parameter(name, "tensor", dtype, c_types[name], *known))
        else:
            name = str(variable.name)
            found.append(Parameter(name, "scalar", str(variable.dtype), c_types[name]))
    return tuple(found)


# ---- reading the emitted text


def call_signature(source: str) -> list[tuple[str, str]]:
    """(name, C type) of each argument of the host entry but the stream."""
    match = re.search(r'^extern "C" TL_EXPORT int call\(([^)]*)\)', source, re.MULTILINE)
    if match is None:
        raise EmulatorError("the emitted source has no `int call(...)`")
    arguments = []
    for text in match.group(1).split(", "):
        c_type, name = text.replace(" __restrict__", "").rsplit(" ", 1)
        arguments.append((name, c_type))
    return arguments[:-1]


def written_names(source: str) -> set[str]:
    """Arguments that a kernel may write: pointers to non-const, and what its stored tensor maps describe."""
    written = set()
    for parameters in re.findall(r"__global__ void (?:__launch_bounds__\([^)]*\) )?\w+\(([^)]*)\)", source):
        for parameter in parameters.split(", "):
            if "*" in parameter and not parameter.startswith("const "):
                written.add(parameter.rsplit(" ", 1)[-1])
    return written | _mapped_names(source, r"tma_store\w*(?:<[^(;]*>)?\(")


def atomic_names(source: str) -> set[str]:
    """Arguments that a kernel updates by read-modify-write: atomics, and adding stores of TMA."""
    adding = r"tma_store_add(?:<[^(;]*>)?\("
    direct = re.findall(r"\bAtomic(?:Add|Max|Min|Or)\w*(?:<[^(;]*>)?\(\(?&\(?(\w+)\[", source)
    bulk = re.findall(adding + r"\(?&\(?(\w+)\[", source)
    return {*direct, *bulk, *_mapped_names(source, adding)}


def _mapped_names(source: str, call: str) -> set[str]:
    """The arguments behind the tensor maps that are the first argument of a call."""
    names = set()
    for handle, address in re.findall(r"void \*(\w+)_globalAddress= ([^;]+);", source):
        if re.search(rf"{call}{handle}\b", source):
            names.update(re.findall(r"\b[A-Za-z_]\w*", address))
    return names


# plain char is not among them: TileLang writes (char*) for offsets in bytes only
_BYTE_TYPES = r"(?:signed char|unsigned char|uchar|u?int8_t|bool|fp[48]_\w+)"


def has_byte_elements(kernel_source: str) -> bool:
    """Whether elements of one byte are stored in memory, as int8, fp8 and bool are."""
    # `uchar buf_dyn_shmem[]`, the block's memory itself, has no number between its brackets
    pattern = rf"\b{_BYTE_TYPES}\s*\*|__shared__[^;]*\b{_BYTE_TYPES} \w+\[\d"
    return re.search(pattern, kernel_source) is not None
