"""R07: CUDA kernels whose offsets go beyond 2^31 elements, under the emulator.

A launch over tokens at the end of buffers of 2^31 elements and more gives the same bits as one over the same tokens in
buffers of their own. The buffers are address space: only the pages that are touched get memory.
"""

import mmap
from math import prod
from typing import Any

import pytest
import torch

from autotune import target
from autotune.emulator import Emulated
from linattn_tl import trials
from tests.conftest import CACHE
from tests.emulated import K, V, lowered
from tl_kernels.spec import Kernel, Problem

TOKENS = 100
NO_RESERVE = 0x4000  # MAP_NORESERVE, which mmap names from Python 3.11 on
# Which row comes first, by the first size of a tensor. 2^26 tokens of 32 and 2^21 states of 32 x 32 are 2^31 elements.
FIRST = {"tokens": 2**27, "keys": 2**27, "rows": 2**27, "S": 2**21, "P": 2**21}
SIZES = {
    "tokens": TOKENS,
    "keys": TOKENS,
    "rows": TOKENS,
    "S": 3,
    "P": 2,
    "H": 1,
    "HV": 1,
    "HZ": 1,
    "B": 1,
    "G": 1,
    "M": 2,
}
NUMBERS = {"spans": 1, "sequences": 1, "length": 0, "segment": 2**30, "initial": 1, "final": 1, "keep_den": 1}
OPTIONS = {
    "feature_map": 0,
    "normalize": 1,
    "scale": 0.5,
    "eps": 1e-6,
    "reverse": 0,
    "use_slots": 1,
    "gated": 1,
    "gates_wanted": 1,
    "piece": 2**30,
    "norm": 1,
}


def space(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take no memory until they are written to, at the start of a page."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, max(prod(shape), 1) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype)[: prod(shape)].view(shape)


def moved(x: torch.Tensor, first: int) -> torch.Tensor:
    """x as the last rows of a tensor that has `first` rows before them."""
    far = space(first + x.shape[0], *x.shape[1:], dtype=x.dtype)
    far[first:] = x
    return far


class Call:
    """The arguments of one launch, by name."""

    def __init__(self, name: str, parameters: Any, chunk: int):
        """name: of the kernel; chunk: tokens of one; states of chunks begin where those of the first token do."""
        sizes, first = {**SIZES, "chunks": -(-TOKENS // chunk)}, {**FIRST, "chunks": FIRST["tokens"] // chunk}
        if "output" in name:  # spans are chunks there, and the only one is the first
            first["chunks"] = 0
        if "decode" not in name:
            sizes["G"], first["G"] = TOKENS, FIRST["tokens"]
        self.chunk = chunk
        self.tensors: dict[str, torch.Tensor] = {}
        self.first: dict[str, int] = {}
        for p in parameters:
            if p.kind != "tensor":
                continue
            shape = [sizes.get(d, 1) if isinstance(d, str) else d for d in p.shape]
            if p.dtype.startswith("int"):
                continue
            x = torch.rand(shape) + 0.5 if p.name in ("den", "z", "z0", "decay") else torch.randn(shape)
            x = -x.abs() if p.name == "g" else x
            self.tensors[p.name] = moved(x.to(getattr(torch, p.dtype)), 0)
            self.first[p.name] = first.get(p.shape[0], 0)

    def arguments(self, parameters: Any, far: bool, scan: bool) -> dict[str, Any]:
        given: dict[str, Any] = {n: moved(x, far * self.first[n]) for n, x in self.tensors.items()}
        segment = 40 if scan else NUMBERS["segment"]  # a scan walks the slots of its segments: 3 of 100 tokens
        start = far * (FIRST["S"] * segment if scan else FIRST["tokens"])
        given["cu_seqlens"] = moved(torch.tensor([start, start + TOKENS], dtype=torch.int32), 0)
        given["slots"] = moved(torch.tensor([far * FIRST["P"] + 1, -1], dtype=torch.int32), 0)
        numbers = {**NUMBERS, **OPTIONS, "segment": segment, "keeps": self.chunk}
        return {p.name: given[p.name] if p.kind == "tensor" else numbers[p.name] for p in parameters}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("kernel", trials.all_kernels("cuda"), ids=lambda kernel: kernel.name)
def test_R07_offsets_beyond_31_bits(kernel: Kernel, arch: str):
    dtype = "bfloat16" if arch == "sm_90a" else "float32"  # as the tests of the runner, which has lowered them
    problem = Problem(kernel.op, dtype, K, V, "cuda")
    config = kernel.configs(problem, target.named(arch))[0]
    function = lowered(kernel, problem, config, arch)
    run = Emulated(function, cache=CACHE / "emulator")
    call = Call(kernel.name, function.parameters, getattr(config, "C", TOKENS))
    results = []
    for far in (False, True):
        given = call.arguments(function.parameters, far, scan=kernel.name.endswith(".scan"))
        run(*given.values(), count=False, in_place=True).assert_clean()
        results.append({n: given[n][far * call.first[n] :] for n in call.tensors})
    assert any(not torch.equal(x, call.tensors[n]) for n, x in results[0].items()), "nothing was written"
    for name, near in results[0].items():
        assert torch.equal(near, results[1][name]), name
