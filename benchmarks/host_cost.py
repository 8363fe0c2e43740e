"""What a call costs the host, without a GPU: `python -m benchmarks.host_cost [--json]`.

Real binaries of the kernels are called through the launchers and runners that serve a GPU. Three things stand in for
one: a driver that accepts everything and does nothing, which is compiled here; tensors in CPU memory, of which a launch
takes no more than the addresses; and two functions of torch, for which others of about the same cost are put in its
CPU build: the index of a tensor's device, and the current stream's handle.

So this is the cost of the Python and C++ between a caller and the driver, not that of a launch. It is CPU time of the
calling thread, which leaves out the time that others have the processor for, but not what they do to its caches; the
table's last column is in units of a call that does nothing but ask for the addresses of seven tensors.
"""

import argparse
import contextlib
import json
import operator
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from autotune import build, cuda_build, target
from autotune.launcher.cuda import CudaBinary
from autotune.store import Store
from linattn_tl import launchers, settings
from linattn_tl.launchers import CudaLauncher
from linattn_tl.ops.linear_attention.cuda import CudaDecode, CudaRunner
from linattn_tl.ops.linear_attention.definition import Options
from tl_kernels.linear_attention.cuda import KERNELS
from tl_kernels.spec import Problem

ARCH, CAPABILITY = "sm_80", 80  # the architecture whose kernels are built soonest; its host code is like any other's
PROBLEM = Problem("linear_attention", "bfloat16", 64, 64, "cuda")
MULTIPROCESSORS = 132
B, T, H = 8, 256, 8  # enough programs that no sequence is cut
SLOTS = 32
UNIT, DECODE = "7 x data_ptr(), the unit", "CudaDecode"  # rows of the table
FORWARD, OUTPUT = "CudaRunner.forward, keep=False", "  of which torch.empty of o"
FORWARD_KEPT, OUTPUTS = "CudaRunner.forward, keep=True", "  of which torch.empty of o and den"

DRIVER = f"""
#include <stdint.h>
typedef int E;
E cuInit(unsigned f) {{ return 0; }}
E cuDriverGetVersion(int *v) {{ *v = 99000; return 0; }}
E cuGetErrorName(E e, const char **t) {{ *t = "ERROR"; return 0; }}
E cuGetErrorString(E e, const char **t) {{ *t = "an error"; return 0; }}
E cuDeviceGet(int *d, int i) {{ *d = i; return 0; }}
E cuDeviceGetAttribute(int *v, int a, int d) {{ *v = a == 75 ? {CAPABILITY // 10} : {CAPABILITY % 10}; return 0; }}
E cuDevicePrimaryCtxRetain(uintptr_t *c, int d) {{ *c = 1; return 0; }}
E cuDevicePrimaryCtxRelease_v2(int d) {{ return 0; }}
E cuCtxGetCurrent(uintptr_t *c) {{ *c = 1; return 0; }}  /* torch has made it current */
E cuCtxPushCurrent_v2(uintptr_t c) {{ return 0; }}
E cuCtxPopCurrent_v2(uintptr_t *c) {{ *c = 1; return 0; }}
E cuThreadExchangeStreamCaptureMode(int *m) {{ return 0; }}
E cuStreamIsCapturing(uintptr_t s, int *on) {{ *on = 0; return 0; }}
E cuModuleLoadData(uintptr_t *m, const void *image) {{ *m = 1; return 0; }}
E cuModuleUnload(uintptr_t m) {{ return 0; }}
E cuModuleGetFunction(uintptr_t *f, uintptr_t m, const char *name) {{ *f = 1; return 0; }}
E cuFuncSetAttribute(uintptr_t f, int a, int v) {{ return 0; }}
E cuTensorMapEncodeTiled() {{ return 0; }}
E cuLaunchKernelEx(const void *c, uintptr_t f, void **p, void **x) {{ return 0; }}
"""


# ---- what stands in for a GPU


@cache
def driver() -> Path:
    """The driver that does nothing, as a library."""
    folder = Path(tempfile.mkdtemp(prefix="linattn_driver_"))
    out = folder / "libdriver.so"
    # Bsymbolic: tilelang, where somebody has imported it, has functions of these names for all to see
    flags = ["-x", "c", "-shared", "-fPIC", "-O2", "-w", "-Wl,-Bsymbolic"]
    command = [build.tools().compiler, *flags, "-", "-o", str(out)]
    subprocess.run(command, input=DRIVER, text=True, check=True)
    return out


@cache
def launcher(stage: str) -> CudaLauncher:
    """The first config of a kernel, in a store of our own: nobody has verified what lies there."""
    kernel = next(k for k in KERNELS if k.name == f"linear_attention.{stage}")
    device = target.named(ARCH)
    config = kernel.configs(PROBLEM, device)[0]
    key = cuda_build.binary_key(kernel, PROBLEM, config, device, checked=False)
    store = Store(settings.cache_dir() / "host_cost")
    entry = store.put(key, lambda path: cuda_build.build(kernel, PROBLEM, config, device, path))
    binary = CudaBinary(entry.path)
    binary.use_driver(driver())
    binary.preload(0)
    return CudaLauncher(binary, config)


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """For tensor.get_device() another method, which is 0 for whole tensors, and for the current stream the default."""
    before = launchers.device_index, launchers.current_stream
    launchers.device_index, launchers.current_stream = torch.Tensor.storage_offset, operator.index
    try:
        yield
    finally:
        launchers.device_index, launchers.current_stream = before


# ---- the calls


def _tokens(*sizes: int) -> torch.Tensor:
    return torch.zeros(*sizes, dtype=getattr(torch, PROBLEM.dtype))


def decode_calls() -> dict[str, Callable[[], object]]:
    """One token of B sequences, out of a pool, from the barest call up."""
    q, k, v = _tokens(B, H, PROBLEM.K), _tokens(B, H, PROBLEM.K), _tokens(B, H, PROBLEM.V)
    kv, z = torch.zeros(SLOTS, H, PROBLEM.K, PROBLEM.V), torch.zeros(SLOTS, H, PROBLEM.K)
    whole = torch.zeros(SLOTS, 2, H, PROBLEM.K, PROBLEM.V), torch.zeros(SLOTS, 2, H, PROBLEM.K)
    slots, wide = torch.arange(B, dtype=torch.int32), torch.arange(B)
    out, opt, one = torch.empty_like(v), Options(output_final_state=True), launcher("decode")
    run = CudaDecode({"linear_attention.decode": one})
    run(q, k, v, kv, z, slots, opt, out)  # so that a block of numbers is kept
    packed = next(plan[0] for plan in one.kept.values())
    tensors = (q, k, v, out, kv, z, slots)
    block = one.binary.addresses(0, 0, *(x.data_ptr() for x in tensors)) + packed
    entry, layer, rows = one.binary.entry, [x[:, 1] for x in whole], (kv[:B], z[:B])
    return {
        # one by one, as the runners do
        UNIT: lambda: (
            (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()),
            (kv.data_ptr(), z.data_ptr(), slots.data_ptr()),
        ),
        "bare call by ctypes": lambda: entry(block),
        "CudaLauncher.launch, 7 tensors": lambda: one.launch(packed, tensors),
        DECODE: lambda: run(q, k, v, kv, z, slots, opt, out),
        "CudaDecode without slots": lambda: run(q, k, v, *rows, None, opt, out),
        "CudaDecode, int64 slots": lambda: run(q, k, v, kv, z, wide, opt, out),
        "CudaDecode, a layer of a larger pool": lambda: run(q, k, v, *layer, slots, opt, out),
    }


def forward_calls() -> dict[str, Callable[[], object]]:
    """A causal pass over B sequences, and what torch takes of it to make the outputs."""
    q, k, v = (_tokens(B, T, H, width) for width in (PROBLEM.K, PROBLEM.K, PROBLEM.V))
    inputs, opt = (q, k, v, None, None), Options()
    run = CudaRunner({"linear_attention.forward": launcher("forward")}, MULTIPROCESSORS)
    return {
        FORWARD: lambda: run.forward(inputs, None, opt, keep=False),
        OUTPUT: lambda: torch.empty_like(v),
        FORWARD_KEPT: lambda: run.forward(inputs, None, opt),
        OUTPUTS: lambda: (
            torch.empty_like(v),
            torch.empty(B, T, H, dtype=torch.float32, device=q.device),
        ),
    }


def backward_calls() -> dict[str, Callable[[], object]]:
    """Gradients of q, k and v: two launches, and five tensors of torch's making."""
    q, k, v = (_tokens(B, T, H, width) for width in (PROBLEM.K, PROBLEM.K, PROBLEM.V))
    inputs, opt = (q, k, v, None, None), Options()
    stages = ("forward", "backward_q", "backward_kv")
    run = CudaRunner({f"linear_attention.{stage}": launcher(stage) for stage in stages}, MULTIPROCESSORS)
    results, saved = run.forward(inputs, None, opt)
    grads, needs = (torch.zeros_like(v), None, None), (True, True, True, False, False)
    return {"CudaRunner.backward, q k v": lambda: run.backward(inputs, results, saved, None, grads, needs, opt)}


# ---- timing and telling


@dataclass(frozen=True)
class Cost:
    median_us: float
    min_us: float


def measure(calls: Mapping[str, Callable[[], object]], rounds: int = 200, number: int = 100) -> dict[str, Cost]:
    """CPU time of one call, in turns, so that what slows the machine meanwhile slows them all."""
    timers = {name: timeit.Timer(call, timer=time.thread_time) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    with stand_ins():
        for _ in range(rounds):
            for name, timer in timers.items():
                samples[name].append(1e6 * timer.timeit(number) / number)
    return {name: Cost(statistics.median(x), min(x)) for name, x in samples.items()}


def all_calls() -> dict[str, Callable[[], object]]:
    with stand_ins():  # making them calls some of them once
        return {**decode_calls(), **forward_calls(), **backward_calls()}


def table(costs: Mapping[str, Cost]) -> str:
    width, unit = max(map(len, costs)), costs[UNIT].min_us
    lines = [f"{'CPU us a call':{width}}  median     min   units"]
    for name, cost in costs.items():
        lines.append(f"{name:{width}}  {cost.median_us:6.2f}  {cost.min_us:6.2f}  {cost.min_us / unit:6.1f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.host_cost", description="What a call costs the host.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    if cuda_build.missing():
        print(f"kernels for {ARCH} cannot be built here: {cuda_build.missing()}", file=sys.stderr)
        return 1
    costs = measure(all_calls())
    print(json.dumps({name: asdict(cost) for name, cost in costs.items()}, indent=1) if args.json else table(costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
