"""Faults that users met in other packages, on our CUDA kernels: as far as the emulator and a stub driver can tell.

`make gpu-check` asks the same of a GPU. R07 is in test_cuda_large_index.py, R19 in cli/test_wheel.py.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from autotune import cuda_build, target
from autotune.target import SHARED_LIMIT
from linattn_tl import devices, launchers, loader, registry
from linattn_tl.launchers import CudaLauncher, EmulatedLauncher
from linattn_tl.ops.linear_attention.cuda import CudaDecode, CudaRunner
from linattn_tl.ops.linear_attention.definition import Options
from linattn_tl.ops.simple_gla import cuda as simple_gla
from linattn_tl.spans import refuse_sizes
from tests.emulated import BF16, FP32, K, V, binary, launcher
from tests.test_cuda_runner import ALL, example
from tl_kernels.delta_rule import cuda as delta
from tl_kernels.linear_attention import cuda
from tl_kernels.simple_gla import cuda as gated
from tl_kernels.spec import DTYPES, Kernel, Problem


def every_order(kernels: Sequence[Kernel], arch: str, dtype: str) -> dict[str, EmulatedLauncher]:
    """Every launch runs under all of the emulator's schedules, whose results must agree bit by bit."""
    passes = [k for k in kernels if not k.name.endswith("decode")]
    return {
        k.name: launcher(k, Problem(k.op, dtype, K, V, "cuda"), arch, every_schedule=True)
        for k in passes
        if k.configs(Problem(k.op, dtype, K, V, "cuda"), target.named(arch))
    }


@pytest.mark.parametrize(("arch", "dtype"), [FP32, BF16])
@pytest.mark.parametrize("causal", [True, False])
def test_R18_results_do_not_depend_on_the_order_of_threads(arch: str, dtype: str, causal: bool):
    run = CudaRunner(every_order(cuda.KERNELS, arch, dtype), 1)
    inputs, lengths = example(dtype, T=70, state=True)
    opt = Options(causal=causal, scale=0.5, output_final_state=True)
    results, saved = run.forward(inputs, lengths, opt)
    grads = [torch.randn_like(x) for x in results]
    assert all(x.isfinite().all() for x in run.backward(inputs, results, saved, lengths, grads, ALL, opt))


@pytest.mark.parametrize(("arch", "dtype"), [FP32, BF16])
def test_R18_gated_results_do_not_depend_on_the_order_of_threads(arch: str, dtype: str):
    run = simple_gla.CudaRunner(every_order(gated.KERNELS, arch, dtype), 1)
    (q, k, v, kv, _), _ = example(dtype, T=70, state=True)
    inputs, opt = [q, k, v, -torch.rand(1, 70, v.shape[2]), kv], simple_gla.Options(0.5, output_final_state=True)
    results, saved = run.forward(inputs, None, opt)
    grads = [torch.randn_like(x) for x in results]
    for kept in (saved, ()):  # all gradients from one kernel, or from two
        assert all(x.isfinite().all() for x in run.backward(inputs, results, kept, None, grads, ALL, opt))


# for a program; then others do their work
MAY_BE_TOO_LARGE = ("backward_kv", "gla.backward", "rule.backward", "rule.prepare_back", "rule.carry_back")
# with a large K; the call is then refused in words
NOT_IN_FLOAT32 = ("rule.forward", "rule.prepare", "rule.carry", "rule.output")


@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_R10_no_config_needs_more_shared_memory_than_its_architecture_has(arch: str):
    """What a config is said to need is a bound on what is allocated: test_cuda_linear_attention.py."""
    device = target.named(arch)
    assert device.smem_bytes == SHARED_LIMIT[arch]
    for kernel in (*cuda.KERNELS, *gated.KERNELS, *delta.KERNELS):
        for dtype in DTYPES:
            if kernel.name == "linear_attention.forward":
                problems = [Problem("linear_attention", dtype, D, D) for D in (64, 128, 256)]
                needs = [cuda.smem_bytes(p, c) for p in problems for c in kernel.configs(p, device)]
                assert max(needs) <= SHARED_LIMIT[arch], (kernel.name, dtype)
            offered = {D: kernel.configs(Problem(kernel.op, dtype, D, D), device) for D in (64, 128, 256)}
            spared = (*MAY_BE_TOO_LARGE, *(NOT_IN_FLOAT32 if dtype != "bfloat16" else ()))
            assert all(offered.values()) or kernel.name.endswith(spared), (kernel.name, dtype)


def test_R10_what_fits_no_program_is_refused_in_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "offered", lambda problem: [target.named("sm_86")])
    monkeypatch.setattr(devices, "refuse", lambda problem: None)
    problem = Problem("delta_rule", "float32", 256, 64, "cuda")
    compiled = registry.get_op("delta_rule").compiled["cuda"]
    said = "K=256, V=64 in float32: no kernel of delta_rule fits sm_86"
    assert loader.refuse_binary(compiled, problem) == said
    assert loader.refuse_jit(compiled, problem) in (said, cuda_build.missing())


@pytest.mark.parametrize("width", [16, 32, 48, 64, 80, 96, 100, 112, 128, 160, 192, 224, 256, 272])
def test_R09_every_head_dim_has_kernels_or_is_refused_in_words(width: int):
    for other in (16, 100, 128, 256):
        for k, v in ((width, other), (other, width)):
            problem = Problem("linear_attention", "bfloat16", k, v, "cuda")
            reason = refuse_sizes(problem)
            if reason is not None:
                assert "multiples of 16 up to 256" in reason and (k % 16 or v % 16 or max(k, v) > 256)
                continue
            assert all(_has_config(kernel, problem) for kernel in (*cuda.KERNELS, *gated.KERNELS, *delta.KERNELS))


def _has_config(kernel: Kernel, problem: Problem) -> bool:
    found = kernel.configs(problem._replace(op=kernel.op), target.named("sm_86"))
    return bool(found) or kernel.name.endswith(MAY_BE_TOO_LARGE)


def test_R13_a_launch_goes_to_the_current_stream_of_its_device(monkeypatch: pytest.MonkeyPatch):
    """Whichever that is at the call: nothing of it is remembered with the sizes."""
    seen: list[Any] = []

    class Recorder:
        tensors, numbers = ("q", "k", "v", "o", "kv", "z", "slots"), ()

        def addresses(self, *words: int) -> tuple[int, ...]:
            return words

        def fixed(self, *numbers: float) -> tuple[float, ...]:
            return ()

        def entry(self, block: Any) -> int:
            seen.append(block[:2])
            return 0

    streams = iter((7, 8, 7))
    monkeypatch.setattr(launchers, "current_stream", lambda device: next(streams))
    recorder: Any = Recorder()
    made = CudaLauncher(recorder, None)
    for _ in range(3):
        made.launch(made.pack({}), [torch.zeros(4)] * 6 + [None])
    assert [stream for _, stream in seen] == [7, 8, 7]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.usefixtures("nan_filled")
def test_R14_padding_among_the_slots(dtype: torch.dtype):
    """A batch larger than its live rows: padding gives zeros, and no row of the pool but the named ones changes."""
    (q, k, v, _, _), _ = example(B=8, T=1)
    (_, _, _, kv, z), _ = example(B=6, T=1, state=True)
    slots = torch.tensor([3, 5, -1, -1, -1, -1, -1, -1], dtype=dtype)
    before, out = (kv.clone(), z.clone()), torch.full_like(v, float("nan"))
    CudaDecode({"linear_attention.decode": binary("linear_attention.decode", *FP32)})(
        q, k, v, kv, z, slots, Options(), out
    )
    assert (out[2:] == 0).all() and out[:2].isfinite().all()
    for now, was in zip((kv, z), before, strict=True):
        assert torch.equal(now[[0, 1, 2, 4]], was[[0, 1, 2, 4]])
        assert not torch.equal(now[3], was[3]) and not torch.equal(now[5], was[5])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.usefixtures("nan_filled")
def test_R14_padding_among_the_slots_of_a_gated_step(dtype: torch.dtype):
    (q, k, v, _, _), _ = example(B=8, T=1)
    (_, _, _, kv, _), _ = example(B=6, T=1, state=True)
    slots = torch.tensor([3, 5, -1, -1, -1, -1, -1, -1], dtype=dtype)
    before, out = kv.clone(), torch.full_like(v, float("nan"))
    run = simple_gla.CudaDecode({"simple_gla.decode": binary("simple_gla.decode", *FP32)})
    run(q, k, v, -torch.rand(v.shape[:3]), kv, slots, simple_gla.Options(), out)
    assert (out[2:] == 0).all() and out[:2].isfinite().all()
    assert torch.equal(kv[[0, 1, 2, 4]], before[[0, 1, 2, 4]])
    assert not torch.equal(kv[3], before[3]) and not torch.equal(kv[5], before[5])
