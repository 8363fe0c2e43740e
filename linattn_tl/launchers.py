"""How a runner launches a CUDA kernel: a loaded binary on a GPU, or its lowered function under the emulator.

A family's runner decides which kernel, which sizes and which tensors; it is the same for both.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch

from autotune.launcher.cuda import CudaBinary
from autotune.launcher.repeat import Argument, Call
from linattn_tl.repeats import launched

if TYPE_CHECKING:
    from autotune.emulator import Emulated
    from autotune.emulator.lowering import Lowered

ALIGNMENT = 16  # bytes; kernels read vectors of this size
device_index: Any = torch.Tensor.get_device
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # torch's CPU build has none


class Launcher(Protocol):
    """One kernel, built with one config, and how it is launched."""

    config: Any
    kept: dict[Any, Any]  # what pack made, by the caller's keys

    def pack(self, numbers: Mapping[str, float]) -> Any:
        """Scalars and dynamic sizes, by name (there may be more than the kernel has), as launch takes them."""
        ...

    def launch(self, packed: Any, tensors: Sequence[torch.Tensor | None]) -> None:
        """Run on the current stream of the first tensor's device.

        Tensors are in the kernel's order, and may have other ranks than the kernel's; None is one that the numbers say
        is not touched. They are contiguous, but for those whose strides are among the numbers.
        """
        ...

    def call(self, packed: Any, tensors: Sequence[Argument]) -> Call | None:
        """How to make a launch again, see linattn_tl.repeats, or None. A tensor's word is its place in launch's."""
        ...


class CudaLauncher:
    """A loaded binary as a Launcher."""

    def __init__(self, binary: CudaBinary, config: Any):
        self.binary, self.config = binary, config
        self.kept: dict[Any, Any] = {}
        self._addresses, self._entry = binary.addresses, binary.entry

    def pack(self, numbers: Mapping[str, float]) -> bytes:
        return self.binary.fixed(*[numbers[name] for name in self.binary.numbers])

    def launch(self, packed: bytes, tensors: Sequence[torch.Tensor | None]) -> None:
        device = device_index(tensors[0])
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        status = self._entry(self._addresses(device, current_stream(device), *addresses) + packed)
        if status:
            self.binary.fail(status)

    def call(self, packed: bytes, tensors: Sequence[Argument]) -> Call:
        block = self._addresses(0, 0, *[0] * len(self.binary.tensors)) + packed
        return launched(self.binary, block, tensors, "cuda", place=0, alignment=ALIGNMENT)


class EmulatedLauncher:
    """A kernel under the emulator, over CPU tensors. A launch with a finding raises NotCleanError with the report.

    every_schedule: run each launch under all of the emulator's schedules, whose results must agree.
    counted: keep what each launch reports, with traffic counted; findings are then the reader's to look for.
    """

    def __init__(self, emulated: "Emulated", config: Any, every_schedule: bool = False, counted: bool = False):
        self.emulated, self.config, self.every_schedule, self.counted = emulated, config, every_schedule, counted
        self.kept: dict[Any, Any] = {}
        self.reports: list[Any] = []  # of autotune.emulator.report

    @property
    def lowered(self) -> "Lowered":
        return self.emulated.lowered

    @cached_property
    def _called(self) -> "Emulated":
        return _by_numbers(self.emulated)

    @cached_property
    def _strides(self) -> set[str]:
        """Dynamic ones."""
        return {s.name for s in self.lowered.symbols} - {d for p in self.lowered.parameters for d in p.shape}

    def pack(self, numbers: Mapping[str, float]) -> Mapping[str, float]:
        names = [p.name for p in self.lowered.parameters if p.kind == "scalar"]
        return {name: numbers[name] for name in (*names, *(s.name for s in self.lowered.symbols))}

    def launch(self, packed: Mapping[str, float], tensors: Sequence[torch.Tensor | None]) -> None:
        wanted = [p for p in self.lowered.parameters if p.kind == "tensor"]
        given = {p.name: self._memory(p, x, packed) for p, x in zip(wanted, tensors, strict=True)}
        arguments = [given[p.name] if p.kind == "tensor" else packed[p.name] for p in self._called.lowered.parameters]
        run = self._called.check if self.every_schedule else self._called
        report = run(*arguments, count=self.counted)
        if self.counted:
            self.reports.append(report)
        else:
            report.assert_clean()

    def call(self, packed: Any, tensors: Sequence[Argument]) -> None:
        return None

    def _memory(self, parameter: Any, x: torch.Tensor | None, packed: Mapping[str, float]) -> torch.Tensor:
        """All that the kernel may touch of x, by the numbers alone, from its first element to its last."""
        shape = [int(packed[d]) if isinstance(d, str) else d for d in parameter.shape]
        if x is None:
            floats = parameter.dtype.startswith(("float", "bfloat"))
            size = torch.Size(shape).numel()
            return torch.full((size,), float("nan") if floats else -1, dtype=getattr(torch, parameter.dtype))
        if parameter.dtype == "int32" and x.dtype is torch.int64:  # for a kernel that reads words of 32 bits
            x = x.view(torch.int32)
        where = f"{self.lowered.name}: {parameter.name}"
        if x.data_ptr() % ALIGNMENT:
            raise ValueError(f"{where} is at address {x.data_ptr():#x}; expected a multiple of {ALIGNMENT}")
        if self._strides.isdisjoint(parameter.strides):
            if not x.is_contiguous():
                raise ValueError(f"{where} has strides {x.stride()}; expected a contiguous tensor")
            return x.view(shape).view(-1)
        if list(x.shape) != shape:
            raise ValueError(f"{where} has shape {tuple(x.shape)}; expected {tuple(shape)}")
        strides = [int(packed[d]) if isinstance(d, str) else d for d in parameter.strides]
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        return x.as_strided((last + 1,), (1,))


def _by_numbers(emulated: "Emulated") -> "Emulated":
    """The kernel called as a binary is: tensors are flat memory, and every dynamic size is an argument."""
    from autotune.emulator.lowering import Parameter

    lowered, called = emulated.lowered, copy.copy(emulated)
    flat = [
        replace(p, shape=(f"elements of {p.name}",), strides=()) if p.kind == "tensor" else p
        for p in lowered.parameters
    ]
    sizes = [Parameter(s.name, "scalar", s.c_type, s.c_type) for s in lowered.symbols]
    called.lowered = replace(lowered, parameters=(*flat, *sizes), symbols=())
    return called
