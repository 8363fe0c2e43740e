"""Two pictures: how many times faster ours is, and time against length."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import OURS, Result

COLORS = {
    OURS: "tab:red",
    "eager chunked": "tab:cyan",
    "eager tuned": "tab:blue",
    "eager loop": "tab:cyan",
    "torch.compile": "tab:green",
    "compile chunked": "tab:olive",
    "compile tuned": "tab:green",
    "SDPA": "tab:gray",
    "eager in place": "tab:orange",
    "definition": "tab:purple",
}
NAMES = {"forward": "forward", "backward": "forward +\nbackward", "long": "long\nforward", "decode": "decode"}


def _axes(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height), layout="constrained")


def ratios(results: Sequence[Result], machine: str, path: Path) -> Path:
    """A group of bars a case: each rival's time over ours."""
    shown = [r for r in results if r.case.group in NAMES]
    figure, axes = _axes(max(7.5, 2.0 + 1.4 * len(shown)), 4.5)
    labelled: set[str] = set()
    for i, result in enumerate(shown):
        rivals = [name for name in result.case.rivals if name in result.times]
        for j, name in enumerate(rivals):
            ratio = result.ratio(name) or 0.0
            x = i + (j - (len(rivals) - 1) / 2) * 0.2
            axes.bar(x, ratio, 0.18, color=COLORS[name], label=None if name in labelled else name)
            axes.annotate(f"{ratio:.1f}", (x, ratio), ha="center", va="bottom", fontsize=7)
            labelled.add(name)
    axes.axhline(1, color=COLORS[OURS], linewidth=1, label=OURS)
    axes.set_xticks(range(len(shown)), [_tick(r) for r in shown], fontsize=8)
    axes.set_ylabel("time / our time")
    axes.set_title(f"How many times faster linattn-tl is, fp32\n{machine}", fontsize=10)
    figure.legend(fontsize=8, loc="outside right upper")
    return _save(figure, path)


def _tick(result: Result) -> str:
    case = result.case
    size = f"B={case.B}" if case.group == "decode" else f"T={case.T}"
    return f"{NAMES[case.group]}\n{size} D={case.D}\nthreads={case.threads}"


def scaling(results: Sequence[Result], machine: str, path: Path) -> Path:
    """Time of a forward pass against T, both logarithmic: linear attention is a line of slope one."""
    figure, axes = _axes(6.0, 4.5)
    case = results[0].case
    for name in (OURS, *case.rivals):
        points = [(r.case.T, r.times[name].median_us / 1e3) for r in results if name in r.times]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=COLORS[name], label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = [r.case.T for r in results]
    axes.set_xticks(lengths, [str(T) for T in lengths])
    axes.minorticks_off()
    axes.set_xlabel("T (tokens)")
    axes.set_ylabel("ms a forward pass")
    axes.set_title(f"B=1, H={case.H}, D={case.D}, fp32, threads={case.threads}\n{machine}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
