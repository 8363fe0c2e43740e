"""CUDA kernels under the emulator, for tests: lowered once, and launched as a runner launches a binary."""

import hashlib
import os
import pickle
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import pytest
import torch

from autotune import cuda_build, target
from autotune.emulator import Emulated, lower
from autotune.emulator.lowering import Lowered
from linattn_tl import spans, trials
from linattn_tl.launchers import EmulatedLauncher
from tests.conftest import CACHE
from tl_kernels.spec import Kernel, Problem

K = V = 32
FP32, BF16 = ("sm_80", "float32"), ("sm_90a", "bfloat16")


def lowered(kernel: Kernel, problem: Problem, config: Any, arch: str) -> Lowered:
    """Kept for the next run of the tests: lowering takes ten seconds and more."""
    key = f"{cuda_build.fingerprint(problem.op)} {kernel.name} {problem} {config} {arch}"
    path = CACHE / "lowered" / hashlib.sha256(key.encode()).hexdigest()
    try:
        return pickle.loads(path.read_bytes())
    except (OSError, EOFError, pickle.PickleError):
        found = lower(kernel.build(problem, config), arch, cuda_build.PASSES)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(found))
        part.replace(path)
        return found


def launcher(
    kernel: Kernel, problem: Problem, arch: str, config: Any = None, every_schedule: bool = False
) -> EmulatedLauncher:
    """config: the first one that is offered, unless given."""
    config = config or kernel.configs(problem, target.named(arch))[0]
    return EmulatedLauncher(
        Emulated(lowered(kernel, problem, config, arch), cache=CACHE / "emulator"), config, every_schedule
    )


class EmulatedBinary:
    """A kernel's first config under the emulator, lowered at the first launch."""

    def __init__(self, name: str, arch: str, dtype: str):
        self.kernel, self.arch = trials.find_kernel(name, "cuda")[1], arch
        self.problem = Problem(self.kernel.op, dtype, K, V, "cuda")
        self.config = self.kernel.configs(self.problem, target.named(arch))[0]
        self.kept: dict[Any, Any] = {}
        self.launches = 0

    @cached_property
    def launcher(self) -> EmulatedLauncher:
        return launcher(self.kernel, self.problem, self.arch)

    def pack(self, numbers: Mapping[str, float]) -> Mapping[str, float]:
        return self.launcher.pack(numbers)

    def launch(self, packed: Mapping[str, float], tensors: Sequence[torch.Tensor | None]) -> None:
        self.launcher.launch(packed, tensors)
        self.launches += 1


@cache
def binary(name: str, arch: str, dtype: str) -> EmulatedBinary:
    """By the kernel's name, linear_attention.forward."""
    return EmulatedBinary(name, arch, dtype)


def cut_short(monkeypatch: pytest.MonkeyPatch, tokens: int = 16) -> None:
    """Spans of 16 tokens or so: as a long sequence is cut, at sizes that the emulator can walk."""
    monkeypatch.setattr(spans, "CARRIED_TOKENS", tokens)
    monkeypatch.setattr(spans, "SPREAD_TOKENS", tokens)
    monkeypatch.setattr(spans, "CARRIED_SPANS", 1)
    monkeypatch.setattr(spans, "SPAN_MULTIPLE", tokens)


def awkward(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same values in memory that a kernel cannot read."""
    if how == "strided":
        return torch.stack([x, torch.full_like(x, float("nan"))], -1)[..., 0]
    if how == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "negated":
        return torch.complex(x.float(), -x.float()).conj().imag
    raw = torch.empty(x.numel() + 1, dtype=x.dtype)
    return raw[1:].view(x.shape).copy_(x)
