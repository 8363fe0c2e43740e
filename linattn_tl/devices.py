"""The devices of this machine as compiled kernels see them."""

from dataclasses import replace
from functools import cache

import torch

from autotune import target
from tl_kernels.spec import Problem, Target


def offered(problem: Problem) -> tuple[Target, ...]:
    """What the problem's device can run binaries of, best first; empty where refuse says why."""
    if problem.device == "cpu":
        return target.offered()
    return gpu(problem.index) if problem.device == "cuda" else ()


def gpu(index: int = 0) -> tuple[Target, ...]:
    """What a GPU can run binaries of, best first; empty without a GPU or for one that nothing is built for."""
    return _cuda(index) if torch.cuda.is_available() else ()


def refuse(problem: Problem) -> str | None:
    """Why no binary can run on the problem's device, or None."""
    if problem.device not in ("cpu", "cuda"):
        return f"no kernel is built for {problem.device} tensors"
    if offered(problem):
        return None
    if problem.device == "cpu":
        return "this CPU is neither x86-64-v3 nor x86-64-v4"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability(problem.index)
    known = ", ".join(target.SHARED_LIMIT)
    return f"compute capability {major}.{minor} runs none of {known}, which kernels are built for"


def capturing(problem: Problem) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return problem.device == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def index_of(device: torch.device | str | None) -> int:
    """The index of a device among those of its type; the current one's where it names none."""
    device = torch.device(device or "cpu")
    if device.index is not None:
        return device.index
    return torch.cuda.current_device() if device.type == "cuda" and torch.cuda.is_available() else 0


@cache
def _cuda(index: int) -> tuple[Target, ...]:
    found = torch.cuda.get_device_properties(index)
    archs = target.cuda_archs(found.major, found.minor)
    return tuple(replace(target.named(arch), name=found.name, cores=found.multi_processor_count) for arch in archs)
