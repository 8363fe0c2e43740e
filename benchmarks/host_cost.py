"""What a call costs the host, without a GPU: `python -m benchmarks.host_cost [--json]`.

Real binaries of the kernels are called through the launchers and runners that serve a GPU. Three things stand in for
one: a driver that accepts everything and does nothing, which is compiled here; tensors in CPU memory, of which a launch
takes no more than the addresses; and two functions of torch, for which others of about the same cost are put in its
CPU build: the index of a tensor's device, and the current stream's handle.

So this is the cost of the Python and C++ between a caller and the driver, not that of a launch. It is CPU time of the
calling thread, which leaves out the time that others have the processor for, but not what they do to its caches; the
table's last column is in units of a call that does nothing but ask for the addresses of seven tensors.

A call is timed as a loop makes it, time after time with tensors of the same layouts (linattn_tl/repeats.py); rows "with
all checks" show what the first ones cost, which includes reading slots that lie in CPU memory, but not on a GPU.
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
from typing import Any

import torch

from autotune import build, cuda_build, target
from autotune.launcher.cuda import CudaBinary
from autotune.store import Store
from linattn_tl import launchers, linear_attention, linear_attention_decode, registry, settings
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
UNIT = "7 x data_ptr(), the unit"  # rows of the table
DECODE = "linear_attention_decode, out given"
DECODE_MADE, FORWARD = "linear_attention_decode", "linear_attention"
EMPTY = "  of which torch.empty_like"
DECODE_CHECKED, FORWARD_CHECKED = "linear_attention_decode with all checks", "linear_attention with all checks"
FORWARD_STATE = "linear_attention, states in and out"

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

Calls = dict[str, Callable[[], object]]


def _tokens(*sizes: int) -> torch.Tensor:
    return torch.zeros(*sizes, dtype=getattr(torch, PROBLEM.dtype))


def _serve(op: str, runner: Any) -> None:
    """Have the public op come to this runner for our problem, as it would on a GPU."""
    registry._state.chosen[(PROBLEM._replace(op=op, device="cpu"), "auto")] = registry.Choice("binary", runner)


def _checked(x: torch.Tensor) -> torch.Tensor:
    """x as what no call is made again with."""
    return torch.nn.Parameter(x, requires_grad=False)


def _known(call: Callable[[], object]) -> Callable[[], object]:
    """A call that has been made often enough to be made again without its checks."""
    for _ in range(3):
        call()
    return call


def decode_calls() -> Calls:
    """One token of B sequences, out of a pool, from the barest call up."""
    q, k, v = _tokens(B, H, PROBLEM.K), _tokens(B, H, PROBLEM.K), _tokens(B, H, PROBLEM.V)
    kv, z = torch.zeros(SLOTS, H, PROBLEM.K, PROBLEM.V), torch.zeros(SLOTS, H, PROBLEM.K)
    whole = torch.zeros(SLOTS, 2, H, PROBLEM.K, PROBLEM.V), torch.zeros(SLOTS, 2, H, PROBLEM.K)
    slots, wide = torch.arange(B, dtype=torch.int32), torch.arange(B)
    out, opt, one = torch.empty_like(v), Options(output_final_state=True), launcher("decode")
    run = CudaDecode({"linear_attention.decode": one})
    run(q, k, v, kv, z, slots, opt, out)  # so that a block of numbers is kept
    packed = next(iter(one.kept.values()))
    tensors = (q, k, v, out, kv, z, slots)
    block = one.binary.addresses(0, 0, *(x.data_ptr() for x in tensors)) + packed
    entry, checked = one.binary.entry, _checked(q)
    state, rows, layer = (kv, z), (kv[:B], z[:B]), (whole[0][:, 1], whole[1][:, 1])
    _serve("linear_attention_decode", run)
    public = {
        DECODE: lambda: linear_attention_decode(q, k, v, state, slots=slots, out=out),
        DECODE_MADE: lambda: linear_attention_decode(q, k, v, state, slots=slots),
        "  without slots": lambda: linear_attention_decode(q, k, v, rows, out=out),
        "  int64 slots": lambda: linear_attention_decode(q, k, v, state, slots=wide, out=out),
        "  a layer of a larger pool": lambda: linear_attention_decode(q, k, v, layer, slots=slots, out=out),
    }
    return {
        UNIT: lambda: (  # one by one, as the runners do
            (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()),
            (kv.data_ptr(), z.data_ptr(), slots.data_ptr()),
        ),
        "bare call by ctypes": lambda: entry(block),
        "CudaLauncher.launch, 7 tensors": lambda: one.launch(packed, tensors),
        **{name: _known(call) for name, call in public.items()},
        "linear_attention_decode with all checks": lambda: linear_attention_decode(
            checked, k, v, state, slots=slots, out=out
        ),
    }


def forward_calls() -> Calls:
    """A causal pass over B sequences, and gradients of q, k and v."""
    q, k, v = (_tokens(B, T, H, width) for width in (PROBLEM.K, PROBLEM.K, PROBLEM.V))
    state = torch.zeros(B, H, PROBLEM.K, PROBLEM.V), torch.zeros(B, H, PROBLEM.K)
    inputs, opt, stages = (q, k, v, None, None), Options(), ("forward", "backward_q", "backward_kv")
    run = CudaRunner({f"linear_attention.{stage}": launcher(stage) for stage in stages}, MULTIPROCESSORS)
    results, saved = run.forward(inputs, None, opt)
    grads, needs = (torch.zeros_like(v), None, None), (True, True, True, False, False)
    checked = _checked(q)
    _serve("linear_attention", run)
    public = {
        FORWARD: lambda: linear_attention(q, k, v),
        EMPTY: lambda: torch.empty_like(v),
        FORWARD_STATE: lambda: linear_attention(q, k, v, initial_state=state, output_final_state=True),
    }
    return {
        **{name: _known(call) for name, call in public.items()},
        FORWARD_CHECKED: lambda: linear_attention(checked, k, v),
        "CudaRunner.forward for a backward": lambda: run.forward(inputs, None, opt),
        "CudaRunner.backward, q k v": lambda: run.backward(inputs, results, saved, None, grads, needs, opt),
    }


# ---- timing and telling


@dataclass(frozen=True)
class Cost:
    median_us: float
    min_us: float


def measure(calls: Mapping[str, Callable[[], object]], rounds: int = 200, number: int = 100) -> dict[str, Cost]:
    """CPU time of one call, in turns, so that what slows the machine meanwhile slows them all."""
    timers = {name: timeit.Timer(call, timer=time.thread_time) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, timer in timers.items():
            samples[name].append(1e6 * timer.timeit(number) / number)
    return {name: Cost(statistics.median(x), min(x)) for name, x in samples.items()}


@contextlib.contextmanager
def all_calls() -> Iterator[Calls]:
    """The calls, and the surroundings they need."""
    registry.forget_choices()
    with stand_ins(), torch.no_grad():
        yield {**decode_calls(), **forward_calls()}
    registry.forget_choices()


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
    with all_calls() as calls:
        costs = measure(calls)
    print(json.dumps({name: asdict(cost) for name, cost in costs.items()}, indent=1) if args.json else table(costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
