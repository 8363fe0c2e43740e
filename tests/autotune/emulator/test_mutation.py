"""The checks fire: every way to break the synchronisation of three generated kernels is caught, or redundant.

REDUNDANT holds each mutant that is not caught, with the reason why it changes nothing. Each has a second argument,
which `mutate` finds: a cover (something else that does its work: without either, there is a finding), or values that
are the kernel's own under every schedule with the detector off. A TileLang that generates other code needs other lists:

    python -m autotune.emulator tests/autotune/emulator/kernels.py::linear_attention --arch sm_80 \
        --arg H=1 D=64 stages=1 --size B=1 L=200,37,0 --mutate
"""

import dataclasses
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.emulator import EmulatorError, lower
from autotune.emulator.mutation import Score, mutate, switched
from tests.autotune.emulator import kernels

GROUPED = "its copies join the next group, and the same waits cover them"
OLD_READS = "the buffer was last read before the barriers at the end of the iteration before"
NEXT_BARRIER = "orders writes of two different buffers; the next barrier comes before either is read"

REDUNDANT: dict[str, dict[str, str]] = {
    "linear_attention-sm_80": {
        "line 35: if (0 < L) made true": "each copy inside is guarded by its own row < L",
        "line 40: tl::cp_async_commit(); removed": GROUPED,
        "line 49: tl::cp_async_commit(); removed": GROUPED,
        "line 89: __syncthreads(); removed": OLD_READS,
        "line 99: __syncthreads(); removed": NEXT_BARRIER,
        "line 160: tl::cp_async_commit(); removed": GROUPED,
        "line 190: tl::cp_async_commit(); removed": GROUPED,
        "line 239: __syncthreads(); removed": OLD_READS,
        "line 249: __syncthreads(); removed": NEXT_BARRIER,
    },
    "linear_attention-sm_90a": {
        "line 62: mbarrier[5].wait(((n & 1) ^ 1)); removed": (
            "consumers read nothing between their arrivals at mbarriers 4 and 5, and 4 was waited for"
        ),
        "line 103: tl::__sync_thread_partial(3, 128); removed": (
            "a warp writes the rows of the weights that only its own wgmma reads, and it has waited for that"
        ),
        "line 126: tl::warpgroup_commit_batch(); removed": "the next product is committed and waited for with it",
        "line 127: tl::warpgroup_wait<0>(); removed": "the next product adds to the same registers, then is waited for",
        "line 127: tl::warpgroup_wait<0>(); -> tl::warpgroup_wait<1>();": (
            "the next product adds to the same registers, then is waited for"
        ),
    },
    "gemm-sm_90a": {},
}


def attention_inputs(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    shape = (1, length, 1, 64)
    given = [(torch.randn(shape, generator=generator) * 0.3).half() for _ in range(3)]
    return [*given, kernels.unwritten(*shape, dtype=torch.float16)]


def gemm_inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randn(*shape, generator=generator).half() for shape in ((120, 160), (160, 136)))
    return [A, B, kernels.unwritten(120, 136)]


def folder() -> Path:
    return Path(os.environ["LINATTN_TL_CACHE_DIR"]) / "emulator"


def score(program: Any, arch: str, *arguments: Callable[[], list[torch.Tensor]]) -> Score:
    return mutate(lower(program, arch), *arguments, cache=folder())


@cache
def scores(name: str) -> Score:
    """Sizes are ragged, below a tile, and (where TMA does not forbid it) empty: together they need every guard."""
    if name == "gemm-sm_90a":
        return score(kernels.gemm(120, 136, 160, stages=2, staged=True), "sm_90a", gemm_inputs)
    arch = name.rpartition("-")[2]
    lengths = (200, 37, 0) if arch == "sm_80" else (200, 37)
    program = kernels.linear_attention(1, 64, stages=1)
    return score(program, arch, *(partial(attention_inputs, length) for length in lengths))


@pytest.mark.parametrize("name", REDUNDANT)
def test_every_mutant_is_caught_or_redundant(name: str):
    found = scores(name)
    print(found)
    assert {str(mutant) for mutant in found.survivors} == set(REDUNDANT[name])
    for mutant in found.survivors:
        assert mutant.number in found.covers or mutant.number in found.agreeing, found.why(mutant)
    kinds = {outcome.mutant.kind for outcome in found.outcomes}
    assert kinds >= {"barrier", "commit", "guard", "wait"}


def test_a_cover_is_what_does_the_same_work():
    """The last line of defence of a survivor: with its cover removed, it is what prevents the finding."""
    found = scores("linear_attention-sm_80")
    survivor = next(m for m in found.survivors if m.line == 249)
    assert [other.line for other in found.covers[survivor.number].others] == [260]
    assert "race" in found.covers[survivor.number].finding


def test_mutants_of_a_broken_kernel_prove_nothing():
    program = kernels.gemm(120, 136, 160, stages=2, staged=True)
    lowered = lower(program, "sm_90a")
    broken = dataclasses.replace(lowered, source=lowered.source.replace("tl::fence_proxy_async();", ""))
    with pytest.raises(EmulatorError, match="not clean itself"):
        mutate(broken, gemm_inputs, cache=folder())


SOURCE = """extern "C" __global__ void f(float* x);
extern "C" __global__ void __launch_bounds__(128, 1) f(float* x) {
  __syncthreads();
  tl::cp_async_wait<1>();
  mbarrier[2].init(128);
  if (((int)threadIdx.x) < 64) {
    tl::prefetch_tma_descriptor(A);
  }
  if (((int)threadIdx.x) < 32) {
    x[0] = 1;
  }
  tl::cp_async_gs_conditional<16>(a, b, (i < n));
}
host();
"""


def test_switches_keep_lines_and_leave_the_host_alone():
    code, mutants = switched(SOURCE)
    assert len(code.splitlines()) == len(SOURCE.splitlines())
    assert code.splitlines()[-1] == "host();"
    assert [(m.line, m.kind, m.change) for m in mutants] == [
        (3, "barrier", "__syncthreads(); removed"),
        (4, "wait", "tl::cp_async_wait<1>(); removed"),
        (4, "wait", "tl::cp_async_wait<1>(); -> tl::cp_async_wait<2>();"),
        (5, "mbarrier", "mbarrier[2].init(128); removed"),
        (5, "mbarrier", "mbarrier[2].init(128); -> mbarrier[2].init(129);"),
        (5, "mbarrier", "mbarrier[2].init(128); -> mbarrier[2].init(64);"),
        (9, "guard", "if (((int)threadIdx.x) < 32) made true"),
        (12, "guard", "condition of tl::cp_async_gs_conditional<16>(a, b, (i < n) made true"),
    ]
    assert code.splitlines()[3] == (
        "  if (emu_mutants[1]) {  } else if (emu_mutants[2]) { tl::cp_async_wait<2>(); } else tl::cp_async_wait<1>();"
    )
