"""python -m benchmarks.static_report: what is known of the CUDA kernels without a GPU.

From the compiler: registers, spills, shared memory, size, and whether tensor cores and TMA are in the machine code.
From the emulator, at a small size: bytes of global memory a token and head that programs ask for, and how many of them
are distinct, both against the floor (each tensor moved once, see each family's trial_cuda.py; the gradient of gates is
not asked for); sectors against the fewest that could hold them, the worst bank conflict of a line, and whether the run
was clean. What reaches HBM should be close to the distinct bytes: value heads that share a q/k head read the same rows,
are neighbours in the grid, and so are to run at the same time and find them in the L2 cache.
Nothing here has run on a GPU, and nothing is a time.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from autotune import cuda_build, target
from autotune.emulator import Emulated
from linattn_tl import settings, trials
from linattn_tl.launchers import EmulatedLauncher
from tl_kernels.spec import Kernel, Problem

T, H = 256, 2  # of the emulated run: some chunks, two heads


@dataclass(frozen=True)
class Row:
    """One kernel on one architecture."""

    kernel: str
    arch: str
    dtype: str
    head_dim: int
    sharing: int  # value heads of a q/k head
    config: str
    registers: int
    spill_bytes: int
    smem_bytes: int
    image_bytes: int
    instructions: dict[str, int] | None  # None without a disassembler
    clean: bool
    bytes_per_token_head: float
    floor_ratio: float  # to the bytes of each tensor moved once
    distinct_ratio: float  # of distinct bytes to the same
    sector_ratio: float
    worst_conflict: float  # passes over the banks of a line, for each that was needed


def report(kernel: Kernel, problem: Problem, arch: str, sharing: int = 1) -> Row:
    config = kernel.configs(problem, target.named(arch))[0]
    lowered = cuda_build.lower(kernel, problem, config, target.named(arch))
    with tempfile.TemporaryDirectory() as folder:
        built = cuda_build.build_lowered(lowered, Path(folder, "kernel.so"), kernel.name, kernel.whole)
    emulated = Emulated(lowered, cache=settings.cache_dir() / "emulator")
    launcher = EmulatedLauncher(emulated, config, counted=True)
    trial = trials.find_kernel(kernel.name, "cuda")[0].trial
    batch = T if kernel.name.endswith("decode") else 1  # of a step, sequences are what tokens are of a pass
    work = trial.workload(kernel, problem, launcher, tokens=T, batch=batch, heads=H, sharing=sharing)
    work.call()
    (run,) = launcher.reports
    registers, spills, smem, image = (
        int(str(built[key])) for key in ("registers", "spill_bytes", "smem_bytes", "image_bytes")
    )
    found = built.get("instructions")
    return Row(
        kernel.name,
        arch,
        problem.dtype,
        problem.K,
        sharing,
        str(config),
        registers,
        spills,
        smem,
        image,
        found if isinstance(found, dict) else None,
        run.clean,
        run.counters.global_bytes / (T * H),
        run.counters.global_bytes / work.bytes,
        run.counters.unique_bytes / work.bytes,
        run.counters.total.sector_ratio,
        max((site.conflict_degree for site in run.sites if site.shared_requests), default=1.0),
    )


def table(rows: list[Row]) -> str:
    head = ("kernel", "arch", "dtype", "D", "regs", "spill", "smem KB", "image KB", "matrix/TMA", "B/token", "x floor")
    lines = [(*head, "distinct", "sectors", "banks", "emulated")]
    for row in rows:
        counts = row.instructions
        units = "?" if counts is None else " ".join(n for n in ("HGMMA", "HMMA", "UTMALDG") if counts.get(n)) or "none"
        lines.append(
            (
                row.kernel,
                row.arch,
                row.dtype,
                str(row.head_dim),
                str(row.registers),
                str(row.spill_bytes),
                f"{row.smem_bytes / 1024:.0f}",
                f"{row.image_bytes / 1024:.1f}",
                units,
                f"{row.bytes_per_token_head:.0f}",
                f"{row.floor_ratio:.2f}",
                f"{row.distinct_ratio:.2f}",
                f"{row.sector_ratio:.2f}",
                f"{row.worst_conflict:.1f}",
                "clean" if row.clean else "NOT CLEAN",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def reported(problem: Problem, arch: str, stages: Collection[str]) -> list[Kernel]:
    """Kernels of a family that calls need on an architecture; of all stages unless some are named."""
    needed = trials.needed_kernels(problem, target.named(arch))
    return [k for k in needed if not stages or k.name.split(".")[1] in stages]


def collect(
    archs: list[str],
    dtypes: list[str],
    dims: list[int],
    stages: Collection[str],
    sharing: int,
    progress: Callable[[str], None],
) -> list[Row]:
    rows = []
    for family, arch, dtype, dim in product(trials.families("cuda"), archs, dtypes, dims):
        problem = Problem(family, dtype, dim, dim, "cuda")
        for kernel in reported(problem, arch, stages):
            progress(f"{kernel.name} {arch} {dtype} {dim}")
            rows.append(report(kernel, problem, arch, sharing))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.static_report", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_80,sm_90a", help="comma-separated (default sm_80,sm_90a)")
    stages = "forward,decode,backward,backward_q,backward_kv"
    parser.add_argument("--stages", default=stages, help=f"comma-separated (default {stages}); '' for all kernels")
    parser.add_argument("--dtypes", default="bfloat16", help="comma-separated (default bfloat16)")
    parser.add_argument("--dims", default="128", help="head dims, comma-separated (default 128)")
    parser.add_argument("--sharing", type=int, default=1, choices=(1, H), help="value heads a q/k head (default 1)")
    parser.add_argument("--json", action="store_true", help="rows as JSON on stdout")
    args = parser.parse_args(argv)
    if cuda_build.missing():
        print(f"static_report: {cuda_build.missing()}", file=sys.stderr)
        return 2
    dims = [int(d) for d in args.dims.split(",")]
    wanted = [stage for stage in args.stages.split(",") if stage]
    archs, dtypes = args.arch.split(","), args.dtypes.split(",")
    rows = collect(archs, dtypes, dims, wanted, args.sharing, lambda text: print(text, file=sys.stderr))
    print(json.dumps([asdict(row) for row in rows], indent=1) if args.json else table(rows))
    return 0 if all(row.clean for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
