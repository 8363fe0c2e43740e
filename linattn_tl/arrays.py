"""Array namespaces beside torch: CuPy for tensors on a GPU, NumPy for tensors on the CPU, behind one interface.

A family writes its chunk forms once, over a namespace `xp`, and runs them as

    with arrays.using(q):                     # q's device and torch's current stream
        a = arrays.array(q, torch.float32)    # torch -> xp, sharing memory where the dtype allows it
        ...                                   # the form itself
        o = arrays.tensor(a, q.dtype)         # xp -> torch, in memory of torch's own, rounded by torch

CuPy is imported when the first tensor on a GPU asks for it, and never with the package.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch

from autotune.build import BuildError
from linattn_tl.registry import Impl
from tl_kernels.spec import Problem

BACKEND = "cupy"


class Arrays:
    """NumPy over tensors on the CPU. The interface that Cupy below has for tensors on a GPU."""

    @property
    def xp(self) -> Any:
        return np

    @contextmanager
    def using(self, x: torch.Tensor) -> Iterator[None]:
        """Compute where x is, in the order of torch's other work, with infinities and NaN as in torch."""
        with np.errstate(all="ignore"):
            yield

    def array(self, x: torch.Tensor, dtype: torch.dtype) -> Any:
        """x as an array of a dtype that both sides have; shares x's memory if x has that dtype already."""
        return self.xp.from_dlpack(x.detach().resolve_neg().to(dtype))

    def tensor(self, a: Any, dtype: torch.dtype) -> torch.Tensor:
        """a as a contiguous tensor. Never a's own memory: torch cannot record another stream's use of that."""
        shared = torch.from_dlpack(a)
        return torch.empty(shared.shape, dtype=dtype, device=shared.device).copy_(shared)

    def kernel(self, source: str, name: str) -> Any:
        """A kernel of CUDA C++, compiled, to be called with (grid, block, arguments); None where there is no GPU."""
        return None


class Cupy(Arrays):
    """CuPy over tensors on a GPU: on torch's current stream, in memory of torch's allocator."""

    @property
    def xp(self) -> Any:
        return importlib.import_module("cupy")

    @contextmanager
    def using(self, x: torch.Tensor) -> Iterator[None]:
        cupy = self.xp
        with ExitStack() as stack:
            stack.enter_context(cupy.cuda.Device(x.device.index))  # first: a stream is entered on its own device
            stack.enter_context(_stream(cupy, x.device))
            stack.enter_context(cupy.cuda.using_allocator(_allocator(cupy).malloc))
            yield

    def kernel(self, source: str, name: str) -> Any:
        kernel = self.xp.RawKernel(source, name, options=("-std=c++17",))
        kernel.compile()  # for the current device; a call on another one compiles for that
        return kernel


def _stream(cupy: Any, device: torch.device) -> Any:
    """torch's current stream, as CuPy's: by the protocol for it, or by its address where a side is older than that."""
    stream = torch.cuda.current_stream(device)
    if hasattr(stream, "__cuda_stream__") and hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(stream)
    return cupy.cuda.ExternalStream(stream.cuda_stream, device.index)


@cache
def _allocator(cupy: Any) -> Any:
    """torch's caching allocator for CuPy: a pool of CuPy's own would keep what torch then lacks, and what is allocated
    while torch captures a graph must come from the graph's pool."""
    return cupy.cuda.PythonFunctionAllocator(
        torch.cuda.caching_allocator_alloc,
        lambda pointer, device: torch.cuda.caching_allocator_delete(pointer),
    )


NUMPY, CUPY = Arrays(), Cupy()


# ---- the backend


@cache
def missing() -> str | None:
    """Why CuPy cannot be used here, or None. Imports it; asked once."""
    try:
        found = importlib.import_module("cupy").cuda.is_available()
    except Exception as error:  # a broken installation raises nearly anything, and must not take torch's backend along
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            return "cupy is not installed"
        return f"cupy does not import: {_first_line(error)}"
    return None if found else "cupy sees no device"


def refuse(problem: Problem) -> str | None:
    """Why the backend cannot serve a problem, or None. CuPy is asked last: CPU tensors never import it."""
    if problem.device != "cuda":
        return f"cupy serves CUDA tensors; these are on {problem.device}"
    return missing()


@cache
def _check_products() -> None:
    """RuntimeError unless CuPy computes: without NVRTC or cuBLAS it sees a device and fails at first use."""
    xp = CUPY.xp
    ones = xp.ones((2, 2), dtype="float32")
    found = float((xp.exp(ones - 1) @ ones).sum())
    if found != 8.0:
        raise RuntimeError(f"a product of ones gave {found}; expected 8")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def with_cupy(impls: Sequence[Impl], runner: Callable[[Arrays], Any]) -> tuple[Impl, ...]:
    """An op's backends with this one before the last, torch. runner(arrays) computes over an array namespace."""

    def load(problem: Problem) -> Any:
        try:
            _check_products()
            return runner(CUPY)
        except Exception as error:  # of CuPy, CUDA, NVRTC or a missing library: the next backend serves
            raise BuildError(f"cupy cannot compute: {_first_line(error)}") from error

    return (*impls[:-1], Impl(BACKEND, refuse, load), impls[-1])
