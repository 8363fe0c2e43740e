"""python -m benchmarks.static_report: what is known of the CUDA kernels without a GPU.

From the compiler: registers, spills, shared memory, size, and whether tensor cores and TMA are in the machine code.
From the emulator, at a small size: bytes of global memory a token and head against the floor (each tensor moved once),
sectors against the fewest that could hold them, the worst bank conflict of a line, and whether the run was clean.
Nothing here has run on a GPU, and nothing is a time.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from autotune import cuda_build, target
from autotune.emulator import emulate
from linattn_tl import settings
from tl_kernels.linear_attention import cuda
from tl_kernels.spec import Kernel, Problem

T, H = 256, 2  # of the emulated run: some chunks, two heads


@dataclass(frozen=True)
class Row:
    """One kernel on one architecture."""

    kernel: str
    arch: str
    dtype: str
    head_dim: int
    config: str
    registers: int
    spill_bytes: int
    smem_bytes: int
    image_bytes: int
    instructions: dict[str, int] | None  # None without a disassembler
    clean: bool
    bytes_per_token_head: float
    floor_ratio: float  # to the bytes of each tensor moved once
    sector_ratio: float
    worst_conflict: float  # passes over the banks of a line, for each that was needed


def inputs(kernel: Kernel, problem: Problem) -> dict[str, Any]:
    """Arguments by name, for every kernel of the family that is reported."""
    dtype = getattr(torch, problem.dtype)
    g = torch.Generator().manual_seed(0)
    new = lambda *size: torch.randn(*size, generator=g)  # noqa: E731
    K, V = problem.K, problem.V
    if kernel.name.endswith("decode"):
        tokens, state = (T, 1, H), T
    else:
        tokens, state = (T, H), 1
    q, k, v = (new(*tokens, d).to(dtype) for d in (K, K, V))
    flags = {"initial": 0, "final": 0, "keep_den": 0, "feature_map": 0, "normalize": 1, "use_slots": 0}
    sizes = {"spans": 1, "sequences": 1, "length": T, "segment": T, "scale": 1.0, "eps": 1e-6}
    states = {"kv": new(state, H, K, V), "z": new(state, H, K).abs()}
    empty = {"kv0": new(1, H, K, V), "z0": new(1, H, K), "kv1": new(1, H, K, V), "z1": new(1, H, K)}
    o, den = torch.empty_like(v), torch.empty(T, H)
    ints = {"cu_seqlens": torch.zeros(1, dtype=torch.int32), "slots": torch.zeros(1, dtype=torch.int32)}
    return {"q": q, "k": k, "v": v, "o": o, "den": den, **flags, **sizes, **states, **empty, **ints}


def floor_bytes(kernel: Kernel, problem: Problem) -> int:
    """A token and head: q, k, v and o once; of a decode step the state, to and fro, as well."""
    size = torch.finfo(getattr(torch, problem.dtype)).bits // 8
    moved = 2 * (problem.K + problem.V) * size
    return moved + 2 * 4 * problem.K * (problem.V + 1) if kernel.name.endswith("decode") else moved


def report(kernel: Kernel, problem: Problem, arch: str) -> Row:
    config = kernel.configs(problem, target.named(arch))[0]
    func = kernel.build(problem, config)
    with tempfile.TemporaryDirectory() as folder:
        built = cuda_build.build_function(func, arch, Path(folder, "kernel.so"), kernel.name)
    emulated = emulate(func, arch, cuda_build.PASSES, cache=settings.cache_dir() / "emulator")
    known = inputs(kernel, problem)
    run = emulated(*(known[p.name] for p in emulated.lowered.parameters))
    moved = run.counters.global_bytes / (T * H)
    registers, spills, smem, image = (
        int(str(built[key])) for key in ("registers", "spill_bytes", "smem_bytes", "image_bytes")
    )
    found = built.get("instructions")
    return Row(
        kernel.name,
        arch,
        problem.dtype,
        problem.K,
        str(config),
        registers,
        spills,
        smem,
        image,
        found if isinstance(found, dict) else None,
        run.clean,
        moved,
        moved / floor_bytes(kernel, problem),
        run.counters.total.sector_ratio,
        max((site.conflict_degree for site in run.sites if site.shared_requests), default=1.0),
    )


def table(rows: list[Row]) -> str:
    head = ("kernel", "arch", "dtype", "D", "regs", "spill", "smem KB", "image KB", "matrix/TMA", "B/token", "x floor")
    lines = [(*head, "sectors", "banks", "emulated")]
    for row in rows:
        counts = row.instructions
        units = "?" if counts is None else " ".join(n for n in ("HGMMA", "HMMA", "UTMALDG") if counts.get(n)) or "none"
        lines.append(
            (
                row.kernel.split(".")[1],
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
                f"{row.sector_ratio:.2f}",
                f"{row.worst_conflict:.1f}",
                "clean" if row.clean else "NOT CLEAN",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def reported() -> list[Kernel]:
    wanted = ("linear_attention.forward", "linear_attention.decode")
    return [kernel for kernel in cuda.KERNELS if kernel.name in wanted]


def collect(archs: list[str], dtypes: list[str], dims: list[int], progress: Callable[[str], None]) -> list[Row]:
    rows = []
    for kernel in reported():
        for arch in archs:
            for dtype in dtypes:
                for dim in dims:
                    progress(f"{kernel.name} {arch} {dtype} {dim}")
                    rows.append(report(kernel, Problem(kernel.op, dtype, dim, dim, "cuda"), arch))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.static_report", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default=",".join(target.SHARED_LIMIT), help="comma-separated (default: all)")
    parser.add_argument("--dtypes", default="bfloat16", help="comma-separated (default bfloat16)")
    parser.add_argument("--dims", default="128", help="head dims, comma-separated (default 128)")
    parser.add_argument("--json", action="store_true", help="rows as JSON on stdout")
    args = parser.parse_args(argv)
    if cuda_build.missing():
        print(f"static_report: {cuda_build.missing()}", file=sys.stderr)
        return 2
    dims = [int(d) for d in args.dims.split(",")]
    rows = collect(args.arch.split(","), args.dtypes.split(","), dims, lambda text: print(text, file=sys.stderr))
    print(json.dumps([asdict(row) for row in rows], indent=1) if args.json else table(rows))
    return 0 if all(row.clean for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
