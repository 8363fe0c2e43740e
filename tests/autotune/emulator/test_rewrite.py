"""The emitted CUDA C++ as g++ gets it: what is rewritten, that lines stay, and what is refused by name."""

import re

import pytest

from autotune.emulator.errors import EmulatorError
from autotune.emulator.rewrite import blank_text, rewrite

KERNEL = """\
extern "C" __global__ void k(float* __restrict__ A);
extern "C" __global__ void __launch_bounds__(128, 1) k(float* __restrict__ A) {
  extern __shared__ __align__(1024) uchar buf_dyn_shmem[];
  __shared__ __align__(16) float xs[128][2];
  __shared__ uint64_t mbarrier_mem[4];
  __shared__ __align__(16) unsigned int count;
  A[threadIdx.x] = xs[threadIdx.y][blockIdx.x] + buf_dyn_shmem[0];
}
"""


def body(text: str) -> str:
    return f'extern "C" __global__ void k(float* A) {{\n{text}\n}}\n'


def test_lines_are_kept() -> None:
    assert rewrite(KERNEL).count("\n") == KERNEL.count("\n")
    broken = body("  __shared__ float\n    xs[4];\n  A[0] = xs[0];")
    lines = rewrite(broken).splitlines()
    assert lines[3] == "  A[0] = xs[0];"


def test_shared_memory_becomes_references_into_the_arena() -> None:
    lines = rewrite(KERNEL).splitlines()
    assert lines[2] == "  uchar *buf_dyn_shmem = (uchar *)emu_dynamic_shared();"
    assert lines[3] == "  float (&xs)[128][2] = *(float (*)[128][2])emu_static_shared(0, sizeof(float[128][2]), 16);"
    assert "emu_static_shared(1, sizeof(uint64_t[4]), alignof(uint64_t))" in lines[4]
    assert lines[5] == "  unsigned int &count = *(unsigned int *)emu_static_shared(2, sizeof(unsigned int), 16);"
    assert "__shared__" not in rewrite(KERNEL)


def test_each_kernel_gets_the_indices_that_it_uses() -> None:
    source = KERNEL + body("  A[gridDim.x] = blockDim.x;").replace("void k(", "void other(")
    declaration, first, *_, second, _, _ = rewrite(source).splitlines()
    assert "threadIdx" not in declaration
    assert re.findall(r"const \w+ (\w+) = emu::", first) == ["threadIdx", "blockIdx"]
    assert re.findall(r"const \w+ (\w+) = emu::", second) == ["blockDim", "gridDim"]


def test_a_kernel_that_declares_its_block_index_keeps_it() -> None:
    swizzled = body("  const dim3 blockIdx = tl::rasterization2DRow<10>();\n  A[blockIdx.x] = threadIdx.x;")
    assert re.findall(r"const \w+ (\w+) = emu::", rewrite(swizzled)) == ["threadIdx"]


def test_text_in_comments_and_strings_is_not_code() -> None:
    source = body('  // asm volatile("x");\n  debug_print_msg("__shared__ asm \\" {");  /* __shared__ int\n x; */')
    assert rewrite(source) == source
    assert len(blank_text(source)) == len(source)
    assert "asm" not in blank_text(source)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ('asm volatile("mov.u32 %0, 1;\\n griddepcontrol.wait;" ::);', "inline PTX, griddepcontrol.wait"),
        ('__asm__ __volatile__("cp.async.wait_group 1;");', "inline PTX, cp.async.wait_group"),
        ("cooperative_groups::this_grid().sync();", "cooperative groups, cooperative_groups::this_grid"),
        ("__shared__ float a[4], b[4];", "a declaration of shared memory of this form, __shared__ float a[4], b[4]"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_its_line(statement: str, words: str) -> None:
    expected = re.escape(f"not covered: {words} (line 3 of the generated source)")
    with pytest.raises(EmulatorError, match=expected):
        rewrite(body(f"  int x = 0;\n  {statement}"))


@pytest.mark.parametrize(
    "declaration", ["__device__ int counter;", "__device__ float table[4] = {1};", "__constant__ int c;"]
)
def test_memory_outside_of_a_kernel_is_refused(declaration: str) -> None:
    with pytest.raises(EmulatorError, match=r"not covered: memory outside of a kernel, .*\(line 1 of"):
        rewrite(f"{declaration}\n{KERNEL}")


def test_device_functions_are_left_alone() -> None:
    function = "__device__ __forceinline__ float twice(float x) { return 2 * x; }\n"
    assert rewrite(function) == function
