"""What the tuner's child processes run: build and check one candidate, time one group of them."""

from collections.abc import Callable

from autotune import measure, target
from autotune.tuner import Group, Task
from linattn_tl import loader, registry
from linattn_tl.registry import Op
from tl_kernels.spec import Kernel, Problem

ROUNDS = 15


def find_kernel(name: str) -> tuple[Op, Kernel]:
    """The op that a kernel serves, and the kernel."""
    for op in registry.all_ops().values():
        for kernel in op.kernels:
            if kernel.name == name:
                return op, kernel
    raise ValueError(f"kernel is {name!r}; expected one of {', '.join(k.name for k in all_kernels())}")


def all_kernels() -> list[Kernel]:
    return list(dict.fromkeys(k for op in registry.all_ops().values() for k in op.kernels))


def verifier(op: Op) -> Callable[..., None]:
    """Checks a loaded binary of one of op's kernels against the definition; raises VerificationError."""
    return lambda kernel, problem, binary: op.trial.check(kernel, problem, op.compiled({kernel.name: binary}))


def build_candidate(task: Task) -> None:
    """Build, check and store one candidate. Raises if it cannot be built or is wrong."""
    op, kernel = find_kernel(task.kernel)
    device = target.named(task.arch)
    problem = Problem(kernel.op, task.dtype, 64, 64)
    config = kernel.find_config(problem, device, task.config)
    loader.build_and_store(kernel, problem, device, verifier(op) if task.checked else None, config)


def time_group(group: Group) -> list[tuple[float, float]]:
    """(median us, GFLOP/s) of each config, timed in turns at one size on one thread."""
    op, kernel = find_kernel(group.kernel)
    device = target.named(group.arch)
    problem = Problem(kernel.op, group.dtype, group.K, group.V)
    calls, flops = {}, 0.0
    for i, items in enumerate(group.configs):
        config = kernel.find_config(problem, device, items)
        binary = loader.stored_binary(kernel, problem, device, config, group.checked)
        calls[str(i)], flops = op.trial.workload(kernel, problem, op.compiled({kernel.name: binary}))
    timings = measure.interleaved(calls, rounds=ROUNDS, min_round_s=5e-3)
    medians = [timings[str(i)].median_us for i in range(len(group.configs))]
    return [(m, flops / m / 1e3) for m in medians]
