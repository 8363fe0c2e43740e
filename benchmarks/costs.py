"""What a call costs besides its arithmetic: the way from Python to the kernel, and the import."""

import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

import linattn_tl
from autotune import measure
from linattn_tl import registry
from linattn_tl.ops.linear_attention import DECODE_OP, OP
from linattn_tl.ops.linear_attention.cpu import CpuDecode, CpuRunner
from linattn_tl.ops.linear_attention.definition import Options
from tl_kernels.spec import Problem

D = 16
_IMPORT = """
import time, torch
start = time.perf_counter()
import linattn_tl
linattn_tl.linear_attention
print(time.perf_counter() - start)
"""


class _Recorder:
    """Stands in for a loaded kernel: passes a call on and keeps the block it was made of."""

    def __init__(self, binary: Any):
        self.binary = binary
        self.addresses, self.fixed, self.kept = binary.addresses, binary.fixed, binary.kept
        self.block = b""

    def __call__(self, block: bytes) -> None:
        self.block = block
        self.binary(block)

    def launch(self) -> Callable[[], object]:
        """The same launch again, with everything already packed."""
        return lambda: self.binary.entry(self.block)


def overhead_us(rounds: int) -> dict[str, tuple[float, float]]:
    """Op -> (us of a tiny call, us of the kernel launch inside it), gradients off, one thread."""
    torch.set_num_threads(1)
    found = {}
    for name, pair in (("linear_attention", _sequence_pair), ("linear_attention_decode", _decode_pair)):
        call, launch, _alive = pair()
        times = measure.interleaved({"call": call, "launch": launch}, rounds=rounds, min_round_s=5e-3)
        found[name] = (times["call"].median_us, times["launch"].median_us)
    return found


def _loaded(op: registry.Op) -> Any:
    """The runner that serves op; RuntimeError where that is no compiled kernel."""
    choice = registry.choose(op, Problem(op.name, "float32", D, D))
    if choice.backend not in registry.COMPILED:
        raise RuntimeError(f"{op.name}: served by {choice.backend}, there is no launch to compare with")
    return choice.runner


def _sequence_pair() -> tuple[Callable[[], object], Callable[[], object], Any]:
    q, k, v = (torch.randn(1, 4, 1, D) for _ in "qkv")
    fwd = _Recorder(_loaded(OP).fwd)
    kernels: dict[str, Any] = {OP.compiled["cpu"].kernels[0].name: fwd}
    results = CpuRunner(kernels).forward((q, k, v, None, None), None, Options())
    return lambda: linattn_tl.linear_attention(q, k, v), fwd.launch(), (q, k, v, results)


def _decode_pair() -> tuple[Callable[[], object], Callable[[], object], Any]:
    q, k, v = (torch.randn(1, 1, D) for _ in "qkv")
    kv, z, out = torch.zeros(1, 1, D, D), torch.zeros(1, 1, D), torch.empty_like(v)
    step = _Recorder(_loaded(DECODE_OP).decode)
    kernels: dict[str, Any] = {DECODE_OP.compiled["cpu"].kernels[0].name: step}
    CpuDecode(kernels)(q[:, None], k[:, None], v[:, None], kv, z, None, Options(), out[:, None])
    call = lambda: linattn_tl.linear_attention_decode(q, k, v, (kv, z), out=out)  # noqa: E731
    return call, step.launch(), (q, k, v, kv, z, out)


def import_seconds(runs: int) -> float:
    """Median time of importing the package and its op in a new process that has imported torch."""
    times = []
    for _ in range(runs):
        done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True)
        times.append(float(done.stdout))
    return statistics.median(times)
