"""Tuned schedules: one JSON file per architecture, sorted rows, read and never imported.

A row says which config of a kernel was fastest for one dtype and head dims on one device:

    {"kernel": "linear_attention.chunk_fwd", "dtype": "float32", "K": 128, "V": 128,
     "config": {"C": 32, "MR": 8, "NR": 32}, "median_us": 9100.0, "gflops": 70.1, "device": "AMD EPYC", ...}
"""

import json
import os
from collections.abc import Iterable, Sequence
from math import log2
from pathlib import Path
from typing import Any

from tl_kernels.spec import Kernel, Problem, Target, config_items

SHIPPED = Path(__file__).parent / "tables"


def row_key(row: dict[str, Any]) -> tuple[str, str, int, int]:
    return (row["kernel"], row["dtype"], row["K"], row["V"])


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a table; an absent or damaged file has none, so it can only be slow."""
    try:
        rows = json.loads(path.read_text())["rows"]
        return [row for row in rows if _usable(row)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _usable(row: Any) -> bool:
    """Whether a row says what it must, in the types that it must."""
    if not isinstance(row, dict) or not isinstance(row.get("config"), dict):
        return False
    sizes, names = (row.get("K"), row.get("V")), (row.get("kernel"), row.get("dtype"))
    right_sizes = all(type(n) is int and n > 0 for n in sizes) and all(type(n) is int for n in row["config"].values())
    return right_sizes and all(isinstance(n, str) for n in names)


def write_rows(path: Path, arch: str, rows: Iterable[dict[str, Any]]) -> None:
    """Replace the table at path, sorted, by an atomic rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = ",\n  ".join(json.dumps(row, sort_keys=True) for row in sorted(rows, key=row_key))
    text = f'{{"arch": "{arch}", "rows": [\n  {body}\n]}}\n'
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def merge_rows(old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a key; a new row replaces an old one."""
    return list({row_key(row): row for row in (*old, *new)}.values())


def ordered_configs(kernel: Kernel, problem: Problem, target: Target, tables: Sequence[Path]) -> list[Any]:
    """Every config that may launch: tuned for the nearest head dims first, then the kernel's own order.

    Earlier tables win over later ones. A row whose config is no longer offered is ignored.
    """
    feasible = list(kernel.configs(problem, target))
    by_value = {config_items(c): c for c in feasible}
    best: list[Any] = []
    for path in tables:
        rows = [r for r in read_rows(path) if r["kernel"] == kernel.name and r["dtype"] == problem.dtype]
        rows.sort(key=lambda r: _distance(r, problem))
        best += [c for r in rows if (c := by_value.get(config_items(r["config"]))) is not None]
    return list(dict.fromkeys([*best, *feasible]))


def _distance(row: dict[str, Any], problem: Problem) -> float:
    return abs(log2(row["K"] / max(problem.K, 1))) + abs(log2(row["V"] / max(problem.V, 1)))
