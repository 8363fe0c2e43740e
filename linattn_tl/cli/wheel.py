"""linattn-tl wheel: this package and the binaries of some architectures, for machines without a compiler."""

import argparse
import json
from pathlib import Path
from typing import Any

from linattn_tl.cli._progress import Bars
from linattn_tl.cli._text import table

NAME = "wheel"
HELP = "make a wheel with the verified binaries of given architectures"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", required=True, help="comma-separated, e.g. cpu-v3,cpu-v4,sm_90a")
    parser.add_argument("--out", default="dist", metavar="FOLDER", help="where the wheel goes (default dist)")


def run(args: argparse.Namespace) -> int:
    from linattn_tl import packaging

    with Bars() as bars:
        made = packaging.make_wheel(args.arch.split(","), Path(args.out), bars.show)
    report = describe(made)
    print(json.dumps(report, indent=1) if args.json else _text(report))
    return 0


def describe(made: Any) -> dict[str, Any]:
    archs = []
    for contents in made.plan.contents:
        manifests = [stored.entry.manifest for stored in contents.binaries]
        archs.append(
            {
                "arch": contents.arch,
                "binaries": len(manifests),
                "bytes": sum(m["size"] for m in manifests),
                "tuned": len(contents.rows),
                "kernels": sorted({m["kernel"] for m in manifests}),
                "dtypes": sorted({m["dtype"] for m in manifests}),
                "verified": sorted({m["verified"] for m in manifests}),
                "lacking": contents.lacking,
            }
        )
    return {
        "archs": archs,
        "left_out": {reason: count for reason, count in made.plan.left_out.items() if count},
        "complaints": made.plan.complaints,
        "tag": made.tag,
        "size": made.path.stat().st_size,
        "wheel": str(made.path),
    }


def _text(report: dict[str, Any]) -> str:
    rows = [
        (a["arch"], len(a["kernels"]), " ".join(a["dtypes"]), a["binaries"], f"{a['bytes'] / 1e6:.2f}", a["tuned"])
        for a in report["archs"]
    ]
    lines = [table(("arch", "kernels", "dtypes", "binaries", "MB", "tuned rows"), rows), ""]
    if report["left_out"]:
        lines.append("left out: " + ", ".join(f"{count} {reason}" for reason, count in report["left_out"].items()))
    lines += [f"  {text}" for text in report["complaints"]]
    for lacking in (name for a in report["archs"] for name in a["lacking"]):
        lines.append(f"lacks {lacking}: calls that need it are served by another backend")
    return "\n".join([*lines, f"{report['wheel']}  {report['size'] / 1e6:.2f} MB"])
