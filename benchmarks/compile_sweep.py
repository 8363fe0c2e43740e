"""Compile the CUDA kernels for every architecture, without executing them: spills, registers and bytes of binaries.

    python -m benchmarks.compile_sweep [--arch ...] [--dtypes ...] [--dims ...] [--configs 1] [--jobs 2] [--json FILE]

`linattn-tl build` verifies what it builds under the emulator, which takes a minute or two a binary. This takes some
seconds, stores nothing, and so can look at everything that is offered: which schedules spill registers, and how large
the binaries of all architectures are together.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from autotune import cuda_build, target
from autotune.build import BuildError
from linattn_tl import trials
from linattn_tl.cli._progress import Bars
from tl_kernels.spec import DTYPES, Problem, config_items


class Job(NamedTuple):
    """One kernel, built with one config; plain data, for another process."""

    kernel: str
    arch: str
    dtype: str
    K: int
    V: int
    config: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Compiled:
    job: Job
    bytes: int = 0  # of the shared object
    registers: int = 0  # the most of its functions
    spill_bytes: int = 0
    error: str = ""


def jobs_of(archs: Sequence[str], dtypes: Sequence[str], dims: Sequence[int], configs: int) -> list[Job]:
    """The first configs of every kernel that calls can need."""
    found = []
    for family in trials.families("cuda"):
        for arch in archs:
            for dtype in dtypes:
                for D in dims:
                    problem, device = Problem(family, dtype, D, D, "cuda"), target.named(arch)
                    for kernel in trials.needed_kernels(problem, device):
                        for config in kernel.configs(problem, device)[:configs]:
                            found.append(Job(kernel.name, arch, dtype, D, D, config_items(config)))
    return found


def compile_one(job: Job) -> Compiled:
    kernel = trials.find_kernel(job.kernel, "cuda")[1]
    problem, device = Problem(kernel.op, job.dtype, job.K, job.V, "cuda"), target.named(job.arch)
    try:
        lowered = cuda_build.lower(kernel, problem, kernel.find_config(problem, device, job.config), device)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "kernel.so")
            said = cuda_build.build_lowered(lowered, out, kernel.name, kernel.whole)
            return Compiled(job, out.stat().st_size, int(str(said["registers"])), int(str(said["spill_bytes"])))
    except BuildError as error:
        return Compiled(job, error=str(error))


def table(found: Sequence[Compiled]) -> str:
    """A line an architecture, dtype and head dim; then what spills or fails."""
    groups = defaultdict(list)
    for x in found:
        groups[x.job.arch, x.job.dtype, x.job.K].append(x)
    lines = [f"{'arch':<9}{'dtype':<10}{'K=V':>5}{'binaries':>10}{'MB':>8}{'registers':>11}{'spilling':>10}"]
    for (arch, dtype, D), group in groups.items():
        size, spilling = sum(x.bytes for x in group) / 1e6, sum(x.spill_bytes > 0 for x in group)
        most = max(x.registers for x in group)
        lines.append(f"{arch:<9}{dtype:<10}{D:>5}{len(group):>10}{size:>8.2f}{most:>11}{spilling:>10}")
    lines.append(f"{len(found)} binaries, {sum(x.bytes for x in found) / 1e6:.2f} MB")
    for x in found:
        if x.spill_bytes or x.error:
            config = " ".join(f"{name}={value}" for name, value in x.job.config)
            what = x.error or f"spills {x.spill_bytes} bytes"
            lines.append(f"{x.job.kernel} {x.job.arch} {x.job.dtype} {x.job.K} {config}: {what}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.compile_sweep", description="Spills and sizes of binaries.")
    parser.add_argument("--arch", default=",".join(target.SHARED_LIMIT), help="architectures (default all)")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="default all")
    parser.add_argument("--dims", default="64,128", help="K = V (default 64,128)")
    parser.add_argument("--configs", type=int, default=1, help="how many of each kernel, best first (default 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default one a core)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write every row")
    args = parser.parse_args(argv)
    if cuda_build.missing():
        print(f"kernels cannot be compiled here: {cuda_build.missing()}", file=sys.stderr)
        return 1
    dims = [int(d) for d in args.dims.split(",")]
    jobs = jobs_of(args.arch.split(","), args.dtypes.split(","), dims, args.configs)
    found = []
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool, Bars() as bars:
        for x in pool.map(compile_one, jobs):
            found.append(x)
            bars.show("compile", len(found), len(jobs))
    if args.json:
        args.json.write_text(json.dumps([asdict(x) for x in found], indent=1) + "\n")
    print(table(found))
    return int(any(x.spill_bytes or x.error for x in found))


if __name__ == "__main__":
    sys.exit(main())
