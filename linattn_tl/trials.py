"""What the tuner's child processes run: build and check one candidate, time one group of them."""

import torch

from autotune import measure, target
from autotune.tuner import Group, Task
from linattn_tl import loader, registry
from linattn_tl.registry import Compiled
from tl_kernels.spec import Kernel, Problem, Target

ROUNDS = 15


def find_kernel(name: str, device: str) -> tuple[Compiled, Kernel]:
    """A kernel for a device type, by its name, and what is known of it and its like."""
    for op in registry.all_ops().values():
        compiled = op.compiled.get(device)
        for kernel in compiled.kernels if compiled else ():
            if compiled and kernel.name == name:
                return compiled, kernel
    known = ", ".join(k.name for k in all_kernels(device))
    raise ValueError(f"kernel is {name!r}; expected one of {known}, for {device}")


def all_kernels(device: str) -> list[Kernel]:
    """Every kernel for a device type."""
    compiled = (op.compiled.get(device) for op in registry.all_ops().values())
    return list(dict.fromkeys(k for c in compiled if c for k in c.kernels))


def needed_kernels(problem: Problem, device: Target) -> list[Kernel]:
    """The kernels that calls of a family (problem.op) with these head dims and this dtype can need on a device."""
    found: list[Kernel] = []
    for compiled in _of_family(problem):
        if compiled.refuse(problem) is None:
            found += compiled.serving(problem, device)
    return list(dict.fromkeys(found))


def refusal(problem: Problem) -> str:
    """Why no kernel of a family serves a problem; "" where one does."""
    return next((why for c in _of_family(problem) if (why := c.refuse(problem))), "")


def _of_family(problem: Problem) -> list[Compiled]:
    every = (op.compiled.get(problem.device) for op in registry.all_ops().values())
    return [c for c in every if c and any(k.op == problem.op for k in c.kernels)]


def families(device: str) -> list[str]:
    return list(dict.fromkeys(k.op for k in all_kernels(device)))


def build_candidate(task: Task) -> None:
    """Build, check and store one candidate. Raises if it cannot be built or is wrong."""
    device = target.named(task.arch)
    compiled, kernel = find_kernel(task.kernel, device.device)
    problem = Problem(kernel.op, task.dtype, task.K, task.V, device.device)
    config = kernel.find_config(problem, device, task.config)
    loader.build_and_store(kernel, problem, device, compiled.trial.check if task.checked else None, config)


def time_group(group: Group) -> list[tuple[float, float]]:
    """(median us, GFLOP/s) of each config, timed in turns at one size: on one thread, or on the current GPU."""
    device = target.named(group.arch)
    compiled, kernel = find_kernel(group.kernel, device.device)
    problem = Problem(kernel.op, group.dtype, group.K, group.V, device.device)
    calls, flops, where = {}, 0.0, {"device": "cuda"} if device.device == "cuda" else {}
    for i, items in enumerate(group.configs):
        config = kernel.find_config(problem, device, items)
        launcher = loader.stored_binary(kernel, problem, device, config, group.checked)
        calls[str(i)], flops = compiled.trial.workload(kernel, problem, launcher, **where)[:2]
    finish = torch.cuda.synchronize if device.device == "cuda" else None
    timings = measure.interleaved(calls, rounds=ROUNDS, min_round_s=5e-3, finish=finish)
    medians = [timings[str(i)].median_us for i in range(len(group.configs))]
    return [(m, flops / m / 1e3) for m in medians]
