"""linattn-tl show: the binaries in the cache and in the wheel, and how fast they were when tuned."""

import argparse
import json
from typing import Any

from linattn_tl.cli._text import config_text, speed_text, table

NAME = "show"
HELP = "what is cached, for which architecture, how fast"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help="only this architecture, e.g. cpu-v4")


def run(args: argparse.Namespace) -> int:
    report = collect(args.arch)
    print(json.dumps(report, indent=1) if args.json else _text(report))
    return 0


def collect(arch: str | None) -> dict[str, Any]:
    from autotune import table as tables
    from autotune.target import ARCHS
    from linattn_tl import loader, settings

    archs = [a for a in ARCHS if arch in (None, a)]
    if not archs:
        raise ValueError(f"--arch is {arch!r}; expected one of {', '.join(ARCHS)}")
    binaries = [{**entry.manifest, "where": str(store.root)} for store in loader.stores() for entry in store.entries()]
    paths = [p for a in archs for p in (settings.cache_dir() / "tables" / f"{a}.json", tables.SHIPPED / f"{a}.json")]
    return {
        "cache": str(settings.cache_dir()),
        "binaries": sorted(
            (b for b in binaries if b["arch"] in archs),
            key=lambda b: (b["arch"], b["kernel"], b["dtype"], _dims(b), sorted(b["config"].items())),
        ),
        "tuned": [{**row, "arch": path.stem} for path in paths for row in tables.read_rows(path)],
    }


def _text(report: dict[str, Any]) -> str:
    binaries = [
        (b["arch"], b["kernel"], b["dtype"], _dims(b), config_text(b["config"]), f"{b['size'] // 1024} KB", _how(b))
        for b in report["binaries"]
    ]
    tuned = [
        (
            r["arch"],
            r["kernel"],
            r["dtype"],
            r["K"],
            r["V"],
            *speed_text(r),
        )
        for r in report["tuned"]
    ]
    parts = [f"{len(binaries)} binaries in {report['cache']} and the installed package"]
    if binaries:
        parts.append(table(("arch", "kernel", "dtype", "dims", "config", "size", "verified"), binaries))
    parts.append(f"\n{len(tuned)} tuned rows" + ("" if tuned else "; `linattn-tl tune` makes them"))
    if tuned:
        parts.append(table(("arch", "kernel", "dtype", "K", "V", "fastest config", "us", "GFLOP/s"), tuned))
    return "\n".join(parts)


def _dims(binary: dict[str, Any]) -> str:
    """The head dims that a binary was built for."""
    static = binary.get("static")
    return f"{static['K']}x{static['V']}" if static else "any"


def _how(binary: dict[str, Any]) -> str:
    """How it was verified, in a word or two."""
    said = str(binary["verified"])
    return said.split(":")[0].split(" against")[0]
