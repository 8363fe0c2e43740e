"""Where the number of a warpgroup is declared in emitted source, and that products over two warpgroups stay right."""

import pytest
import torch

from autotune import cuda_build
from autotune.emulator import Emulated
from autotune.warpgroups import make_uniform
from tests.autotune.emulator import kernels

DECLARED = "const int uniform_warpgroup = __shfl_sync(0xffffffff, ((int)threadIdx.x) >> 7, 0);"
WGMMA = "tl::wgmma_ss<64>(uint64_t(desc_a), uint64_t(desc_b + ((((int)threadIdx.x) >> 7) * 4096)), C, 1);"
UNIFORM = "tl::wgmma_ss<64>(uint64_t(desc_a), uint64_t(desc_b + (uniform_warpgroup * 4096)), C, 1);"


def kernel(*lines: str) -> list[str]:
    """The lines of a kernel with a barrier by another number of the warpgroup, made uniform."""
    source = "\n".join(['extern "C" __global__ void k(float* A) {', "A[(((int)threadIdx.x) >> 7)] = 0;", *lines, "}"])
    first, kept, *made, last = make_uniform(source).split("\n")
    assert (first, last) == ('extern "C" __global__ void k(float* A) {', "}")
    return [line.strip() for line in (kept, *made)]


@pytest.mark.parametrize("loop", ["  for (int n = 0; n < count; ++n) {", "    for (int n = 0; n < 7; ++n) {"])
def test_it_is_declared_in_the_outermost_loop(loop: str):
    """Once, whatever is inside; braces count, for emitted code is not always indented."""
    inside = ["if (x) {", "y = 0;", "} else {", "y = 1;", "}", "for (int ki = 0; ki < 4; ++ki) {", WGMMA, "}", WGMMA]
    kept, first, declared, *rest = kernel(loop, *inside, "  }")
    assert "threadIdx.x) >> 7" in kept, "what is not of wgmma stays"
    assert (first, declared) == (loop.strip(), DECLARED)
    assert rest == [line.replace(WGMMA, UNIFORM) for line in inside] + ["}"]


def test_an_unrolled_loop_does_not_count():
    unrolled = ["#pragma unroll", "for (int ki = 0; ki < 4; ++ki) {", WGMMA, "}"]
    kept, *_ = made = kernel(*unrolled)
    assert kept == DECLARED, "in the function, where no loop lasts"
    assert made[2:] == [line.replace(WGMMA, UNIFORM) for line in unrolled]
    loop, declared = kernel("for (int n = 0; n < count; ++n) {", *unrolled, "}")[1:3]
    assert loop.startswith("for (int n") and declared == DECLARED


def test_each_loop_has_its_own():
    loop = ["for (int n = 0; n < count; ++n) {", WGMMA, "}"]
    assert kernel(*loop, *loop)[1:] == [loop[0], DECLARED, UNIFORM, "}"] * 2


def test_other_source_is_left_alone():
    source = "for (;;) {\n  mma(((int)threadIdx.x) >> 7);\n  // tl::wgmma_ss((((int)threadIdx.x) >> 7))\n}"
    assert make_uniform(source) == source


@pytest.mark.skipif(bool(cuda_build.missing()), reason=cuda_build.missing())
def test_a_product_over_two_warpgroups():
    program = kernels.gemm(64, 128, 96, (64, 128, 32), threads=256)
    lowered = cuda_build.lower_function(program, "sm_90a")
    assert DECLARED in lowered.kernel_source and DECLARED in lowered.source
    A, B = (kernels.tensor(*shape, dtype=torch.float16) for shape in ((64, 96), (96, 128)))
    C = kernels.unwritten(64, 128)
    Emulated(lowered).check(A, B, C).assert_clean()
    kernels.assert_close(C, kernels.gemm_reference(A, B), 1e-3)
