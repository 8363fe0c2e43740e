"""The arguments of one call: checked against the prim_func, sizes solved, tensors laid out as a device holds them."""

import ast
import ctypes
import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from autotune.emulator.errors import EmulatorError
from autotune.emulator.lowering import Dim, Lowered, Parameter

ALIGNMENT = 256  # bytes; what cudaMalloc gives. torch aligns CPU tensors to 64, and vector loads and TMA may want more

C_TYPES: dict[str, Any] = {
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "int": ctypes.c_int32,
    "unsigned int": ctypes.c_uint32,
    "int8_t": ctypes.c_int8,
    "uint8_t": ctypes.c_uint8,
    "int16_t": ctypes.c_int16,
    "uint16_t": ctypes.c_uint16,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
}
_SAME_DTYPE = {"float8_e4m3": "float8_e4m3fn"}  # TileLang has two names for what torch calls float8_e4m3fn


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a TileLang dtype."""
    dtype = getattr(torch, _SAME_DTYPE.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise EmulatorError(f"torch has no dtype {name}")
    return dtype


# ---- sizes

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(dim: Dim, sizes: Mapping[str, int]) -> int | None:
    """The value of a dimension, or None while a symbol is unknown or the expression is of a kind not read here."""
    if isinstance(dim, int):
        return dim
    try:
        tree = ast.parse(dim, mode="eval").body
    except SyntaxError:
        return None
    return _value(tree, sizes)


def _value(node: ast.expr, sizes: Mapping[str, int]) -> int | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return sizes.get(node.id)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, sizes), _value(node.right, sizes)
        if left is None or right is None or (right == 0 and isinstance(node.op, ast.FloorDiv | ast.Mod)):
            return None
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        values = [_value(a, sizes) for a in node.args]
        known = [v for v in values if v is not None]
        return {"min": min, "max": max}[node.func.id](known) if known and len(known) == len(values) else None
    return None


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return strides


def _show(dims: Sequence[Any]) -> str:
    return "(" + ", ".join(map(str, dims)) + ("," if len(dims) == 1 else "") + ")"


@dataclass
class _Sizes:
    """Symbols solved so far, and which argument each came from."""

    kernel: str
    values: dict[str, int] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)

    def bind(self, name: str, value: int, argument: str) -> None:
        if name not in self.values:
            self.values[name], self.origin[name] = value, argument

    def check_shape(self, parameter: Parameter, shape: Sequence[int]) -> None:
        want = [evaluate(d, self.values) for d in parameter.shape]
        if all(w is None or w == s for w, s in zip(want, shape, strict=True)):
            return
        expected = _show(parameter.shape)
        if any(isinstance(d, str) for d in parameter.shape):
            shown = ["?" if w is None else w for w in want]
            expected = f"[{', '.join(map(str, parameter.shape))}] = {_show(shown)}"
        used = [n for n in self.values if any(_names(d, n) for d in parameter.shape)]
        sources = ", ".join(f"{n} from {self.origin[n]}" for n in used if self.origin[n] != parameter.name)
        whose = f" ({sources})" if sources else ""
        raise ValueError(
            f"{self.kernel}: argument {parameter.name} has shape {_show(shape)}; expected {expected}{whose}"
        )

    def check_strides(self, parameter: Parameter, shape: Sequence[int]) -> None:
        if 0 in shape:
            return  # nothing is there to be reached by a stride
        have = contiguous_strides(shape)
        for dim, stride in zip(parameter.strides, have, strict=False):
            if isinstance(dim, str) and dim.isidentifier():
                self.bind(dim, stride, parameter.name)
        want = [evaluate(d, self.values) for d in parameter.strides]
        pairs = zip(want, have, shape, strict=False)
        if any(w not in (None, h) for w, h, size in pairs if size > 1):
            raise ValueError(
                f"{self.kernel}: argument {parameter.name} is contiguous, with strides {_show(have)}; "
                f"the kernel expects {_show(parameter.strides)} = {_show(want)}, which the emulator cannot give it"
            )


def _names(dim: Dim, symbol: str) -> bool:
    if isinstance(dim, int):
        return False
    return any(isinstance(n, ast.Name) and n.id == symbol for n in ast.walk(ast.parse(dim, mode="eval")))


# ---- one call


@dataclass
class Tensor:
    """A tensor argument: the caller's memory, and the copy that the kernel works on unless it works in place."""

    parameter: Parameter
    shape: tuple[int, ...]
    address: int  # the caller's
    bytes: int
    readonly: bool
    _memory: np.ndarray | None = field(repr=False)  # the copy and room to align it

    @property
    def staged(self) -> int:
        """The address that the kernel is given."""
        if self._memory is None:
            return self.address
        start = self._memory.ctypes.data
        return start + -start % ALIGNMENT

    def copy_back(self) -> None:
        if self._memory is not None and not self.readonly:
            ctypes.memmove(self.address, self.staged, self.bytes)

    def data(self) -> torch.Tensor:
        """The copy, as a torch tensor over the same memory."""
        if self._memory is None:
            raise ValueError(f"{self.parameter.name} was worked on in place; there is no copy")
        start = self.staged - self._memory.ctypes.data
        flat = torch.from_numpy(self._memory[start : start + self.bytes])
        return flat.view(torch_dtype(self.parameter.dtype)).reshape(self.shape)


@dataclass(frozen=True)
class Call:
    """What `call(...)` gets, in order; the tensors among it; the sizes."""

    tensors: list[Tensor]
    values: list[Any]  # ctypes values, the stream last
    sizes: dict[str, int]


def prepare(
    lowered: Lowered, given: Sequence[Any], readonly: Sequence[str | int] | None, in_place: bool = False
) -> Call:
    """Check the arguments and copy the tensors. Nothing of the caller's is changed; in_place copies nothing.

    Raises:
        TypeError: the number of arguments, what one is, its device or its dtype.
        ValueError: a shape, a scalar out of range, memory that two arguments share, an unknown name in readonly.
    """
    parameters = lowered.parameters
    if len(given) != len(parameters):
        names = ", ".join(p.name for p in parameters)
        raise TypeError(f"{lowered.name}: got {len(given)} arguments; expected {len(parameters)}: {names}")
    protected = read_only_names(lowered, readonly)
    sizes = _Sizes(lowered.name)
    tensors, scalars = {}, {}
    for parameter, value in zip(parameters, given, strict=True):
        if parameter.kind == "scalar":
            scalars[parameter.name] = _scalar(lowered.name, parameter, value)
            if isinstance(scalars[parameter.name].value, int):
                sizes.bind(parameter.name, int(value), parameter.name)
        else:
            tensors[parameter.name] = _tensor(lowered.name, parameter, value, parameter.name in protected, in_place)
    _solve(sizes, list(tensors.values()))
    _check_overlaps(lowered.name, list(tensors.values()))
    values: list[Any] = []
    for parameter in parameters:
        staged = tensors.get(parameter.name)
        values.append(scalars[parameter.name] if staged is None else ctypes.c_void_p(staged.staged))
    for symbol in lowered.symbols:
        if symbol.name not in sizes.values:
            raise EmulatorError(f"{lowered.name}: no argument tells the size {symbol.name}")
        values.append(_converted(lowered.name, symbol.name, symbol.c_type, sizes.values[symbol.name]))
    values.append(ctypes.c_void_p(0))  # the stream
    return Call(list(tensors.values()), values, dict(sizes.values))


def read_only_names(lowered: Lowered, readonly: Sequence[str | int] | None) -> set[str]:
    """Names of the arguments that the kernel must not write; None is what the emitted code declares const."""
    tensors = [p.name for p in lowered.parameters if p.kind == "tensor"]
    if readonly is None:
        return {p.name for p in lowered.parameters if p.kind == "tensor" and not p.written}
    names = set()
    for entry in readonly:
        if isinstance(entry, int) and 0 <= entry < len(lowered.parameters):
            entry = lowered.parameters[entry].name
        if entry not in tensors:
            raise ValueError(
                f"{lowered.name}: readonly names {entry!r}; the tensor arguments are {', '.join(tensors)}, "
                f"or an index below {len(lowered.parameters)}"
            )
        names.add(str(entry))
    return names


def _solve(sizes: _Sizes, tensors: list[Tensor]) -> None:
    for tensor in tensors:
        for dim, size in zip(tensor.parameter.shape, tensor.shape, strict=True):
            if isinstance(dim, str) and dim.isidentifier():
                sizes.bind(dim, size, tensor.parameter.name)
    for tensor in tensors:
        sizes.check_shape(tensor.parameter, tensor.shape)
    for tensor in tensors:
        sizes.check_strides(tensor.parameter, tensor.shape)


def _tensor(kernel: str, parameter: Parameter, value: Any, readonly: bool, in_place: bool) -> Tensor:
    where = f"{kernel}: argument {parameter.name}"
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise TypeError(f"{where} is on {value.device}; expected a CPU tensor")
        dtype, contiguous, writable = str(value.dtype).removeprefix("torch."), value.is_contiguous(), True
        address, shape = value.data_ptr(), tuple(value.shape)
        size = value.numel() * value.element_size()
    elif isinstance(value, np.ndarray):
        dtype, contiguous, writable = value.dtype.name, value.flags.c_contiguous, value.flags.writeable
        address, shape, size = value.ctypes.data, value.shape, value.nbytes
    else:
        raise TypeError(f"{where} is a {type(value).__name__}; expected a torch tensor or a numpy array")
    if dtype != _SAME_DTYPE.get(parameter.dtype, parameter.dtype):
        raise TypeError(f"{where} has dtype {dtype}; expected {parameter.dtype}")
    if len(shape) != len(parameter.shape):
        raise ValueError(
            f"{where} has {len(shape)} dimensions, {_show(shape)}; expected {len(parameter.shape)}, "
            f"{_show(parameter.shape)}"
        )
    if not contiguous:
        raise ValueError(f"{where} is not contiguous; pass {parameter.name}.contiguous() or a copy")
    if not (readonly or writable):
        raise ValueError(f"{where} is a numpy array that cannot be written, and the kernel writes it")
    if in_place:
        if address % ALIGNMENT:
            raise ValueError(
                f"{where} is at {address:#x}; expected a multiple of {ALIGNMENT}, to be worked on in place"
            )
        return Tensor(parameter, shape, address, size, readonly, None)
    tensor = Tensor(parameter, shape, address, size, readonly, np.empty(size + ALIGNMENT, np.uint8))
    ctypes.memmove(tensor.staged, address, size)
    return tensor


def _check_overlaps(kernel: str, tensors: list[Tensor]) -> None:
    """The emitted pointers are __restrict__, and each argument has its own copy here: what is written must be alone."""
    for one in tensors:
        for other in tensors:
            disjoint = one.address + one.bytes <= other.address or other.address + other.bytes <= one.address
            if one is not other and not one.readonly and not disjoint and one.bytes and other.bytes:
                raise ValueError(
                    f"{kernel}: arguments {one.parameter.name} and {other.parameter.name} share memory, and the "
                    f"kernel writes {one.parameter.name}; its pointers are __restrict__"
                )


def _scalar(kernel: str, parameter: Parameter, value: Any) -> Any:
    floats = parameter.c_type in ("float", "double")
    if not isinstance(value, numbers.Real if floats else numbers.Integral):
        kind = "a number" if floats else "an integer"
        raise TypeError(f"{kernel}: argument {parameter.name} is a {type(value).__name__}; expected {kind}")
    number = float(value) if floats else int(value)  # pyright: ignore[reportArgumentType]
    return _converted(kernel, parameter.name, parameter.c_type, number)


def _converted(kernel: str, name: str, c_type: str, value: float) -> Any:
    if c_type not in C_TYPES:
        raise EmulatorError(f"{kernel}: argument {name} is a scalar of type {c_type}; pass it as float32")
    converted = C_TYPES[c_type](value)
    if isinstance(value, int) and converted.value != value:
        raise ValueError(f"{kernel}: argument {name} is {value}, which {c_type} does not hold")
    return converted
