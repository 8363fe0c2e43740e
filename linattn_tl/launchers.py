"""How a runner launches a CUDA kernel: a loaded binary on a GPU, or its lowered function under the emulator.

A family's runner decides which kernel, which sizes and which tensors; it is the same for both.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from autotune.launcher.cuda import CudaBinary

if TYPE_CHECKING:
    from autotune.emulator import Emulated

ALIGNMENT = 16  # bytes; kernels read vectors of this size


class Launcher(Protocol):
    """One kernel, built with one config, and how it is launched."""

    config: Any
    kept: dict[Any, Any]  # what pack made, by the caller's keys

    def pack(self, numbers: Mapping[str, float]) -> Any:
        """Scalars and dynamic sizes, by name (there may be more than the kernel has), as launch takes them."""
        ...

    def launch(self, packed: Any, tensors: Sequence[torch.Tensor | None]) -> None:
        """Run on the current stream of the first tensor's device.

        Tensors are in the kernel's order, contiguous, and may have other ranks than the kernel's; None is one that the
        numbers say is not touched.
        """
        ...


class CudaLauncher:
    """A loaded binary as a Launcher."""

    def __init__(self, binary: CudaBinary, config: Any):
        self.binary, self.config = binary, config
        self.kept: dict[Any, Any] = {}

    def pack(self, numbers: Mapping[str, float]) -> bytes:
        return self.binary.fixed(*[numbers[name] for name in self.binary.numbers])

    def launch(self, packed: bytes, tensors: Sequence[torch.Tensor | None]) -> None:
        device = tensors[0].get_device()  # pyright: ignore[reportOptionalMemberAccess]
        stream = torch._C._cuda_getCurrentRawStream(device)
        words = [0 if x is None else x.data_ptr() for x in tensors]
        self.binary(self.binary.addresses(device, stream, *words) + packed)


class EmulatedLauncher:
    """A kernel under the emulator, over CPU tensors. A launch with a finding raises NotCleanError with the report.

    every_schedule: run each launch under all of the emulator's schedules, whose results must agree.
    """

    def __init__(self, emulated: "Emulated", config: Any, every_schedule: bool = False):
        self.emulated, self.config, self.every_schedule = emulated, config, every_schedule
        self.kept: dict[Any, Any] = {}

    def pack(self, numbers: Mapping[str, float]) -> Mapping[str, float]:
        lowered = self.emulated.lowered
        names = [p.name for p in lowered.parameters if p.kind == "scalar"] + [s.name for s in lowered.symbols]
        return {name: numbers[name] for name in names}

    def launch(self, packed: Mapping[str, float], tensors: Sequence[torch.Tensor | None]) -> None:
        parameters = self.emulated.lowered.parameters
        wanted = [p for p in parameters if p.kind == "tensor"]
        given = {p.name: self._seen(p, x, packed) for p, x in zip(wanted, tensors, strict=True)}
        arguments = [given[p.name] if p.kind == "tensor" else packed[p.name] for p in parameters]
        run = self.emulated.check if self.every_schedule else self.emulated
        run(*arguments, count=False).assert_clean()

    def _seen(self, parameter: Any, x: torch.Tensor | None, packed: Mapping[str, float]) -> torch.Tensor:
        """x as the kernel sees it, by the sizes in the numbers alone."""
        shape = [int(packed[d]) if isinstance(d, str) else d for d in parameter.shape]
        if x is None:
            floats = parameter.dtype.startswith(("float", "bfloat"))
            return torch.full(shape, float("nan") if floats else -1, dtype=getattr(torch, parameter.dtype))
        if not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
            raise ValueError(f"{self.emulated.lowered.name}: {parameter.name} is not contiguous and aligned")
        return x.view(shape)
