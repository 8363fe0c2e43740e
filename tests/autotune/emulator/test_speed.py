"""Emulating is quick enough to be done for every config: a small forward pass, built and run."""

import shutil
import time

import torch

from tests.autotune.emulator import kernels

RUN, BUILD = 0.3, 1.5  # seconds, several times what a quiet machine takes


def quickest(action, times: int = 3) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return min(taken)


def test_a_run_with_all_checks_and_counters():
    """Two blocks of 256 tokens, head dim 64."""
    kernel = kernels.built("sm_90a", kernels.linear_attention, 2, 64, stages=1)
    Q, K, V = (kernels.tensor(1, 256, 2, 64, dtype=torch.float16, scale=0.3) for _ in range(3))
    out = kernels.unwritten(1, 256, 2, 64, dtype=torch.float16)
    assert quickest(lambda: kernel(Q, K, V, out).assert_clean()) < RUN


def test_a_build_beyond_lowering(tmp_path):
    """With the runtime and the shims' precompiled header in the cache, as they are after the first kernel."""
    from autotune.emulator.builder import build

    kernel = kernels.built("sm_90a", kernels.linear_attention, 2, 64, stages=1)
    cache, tag = kernel.built.path.parents[2], iter(range(3))

    def build_anew() -> None:
        built = build(f"{kernel.source}\n// {tmp_path} {next(tag)}", cache)
        assert not built.cached
        shutil.rmtree(built.path.parent)

    assert quickest(build_anew) < BUILD
