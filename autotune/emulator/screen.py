"""A report as text: one screen, the verdict first."""

from collections.abc import Sequence

from autotune.emulator.places import Place
from autotune.emulator.report import Report, Site

WIDTH = 120
FINDINGS = 12  # shown; the rest is counted
LINES = 5  # of the source, in each table


def render(report: Report) -> str:
    blocks = [_verdict(report), _findings(report), _waits(report)]
    if report.sites:
        blocks += [_totals(report), _arguments(report), _global_lines(report), _shared_lines(report)]
    return "\n".join(line for block in blocks for line in block)


def amount(count: float, unit: str = "B") -> str:
    """1536 -> "1.5 KiB"; FLOPs and counts go by thousands: "2.1 MFLOP"."""
    step, prefixes = (1024, ("", "Ki", "Mi", "Gi", "Ti")) if unit == "B" else (1000, ("", "k", "M", "G", "T"))
    power = 0
    while abs(count) >= step and power + 1 < len(prefixes):
        count, power = count / step, power + 1
    return f"{count:.0f} {unit}" if power == 0 else f"{count:.1f} {prefixes[power]}{unit}"


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."


def _verdict(report: Report) -> list[str]:
    kinds: dict[str, int] = {}
    for finding in report.findings:
        kinds[finding.kind] = kinds.get(finding.kind, 0) + 1
    listed = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    verdict = "clean" if report.clean else f"NOT CLEAN: {listed or 'ended early'}"
    sizes = "".join(f" {name}={value}" for name, value in report.sizes.items())
    how = "; ".join(name for name in report.schedules if name)
    lines = [f"{verdict} -- {report.kernel} on {report.arch}{sizes}, {report.blocks} blocks, {report.seconds:.2f} s"]
    if how:
        lines.append(f"  schedule {how}")
    if report.stopped:
        lines.append("  the launch ended early; outputs and counters are incomplete")
    lines += [f"  launch {launch}" for launch in report.launches]
    return lines


def _findings(report: Report) -> list[str]:
    lines = []
    for finding in report.findings[:FINDINGS]:
        schedule = f" [{finding.schedule}]" if len(report.schedules) > 1 and finding.schedule else ""
        lines.append(f"{finding}{schedule}")
        places = [finding.place]
        if finding.other_place.line != finding.place.line:
            places.append(finding.other_place)
        lines += [_source_line(place) for place in places if place.line]
    if len(report.findings) > FINDINGS:
        lines.append(f"and {len(report.findings) - FINDINGS} more findings, in report.findings")
    return lines


def _source_line(place: Place) -> str:
    head = f"    line {place.line}: "
    return head + shortened(place.text, WIDTH - len(head))


def _waits(report: Report) -> list[str]:
    if not report.waits:
        return []
    lines = ["who waited when nothing could run:"]
    for wait in report.waits[:FINDINGS]:
        lines.append(f"  {wait}")
        if wait.place.line:
            lines.append(_source_line(wait.place))
    return lines


def _totals(report: Report) -> list[str]:
    counters = report.counters
    total = counters.total
    rows = [
        (
            "global memory",
            f"{amount(total.global_read)} read, {amount(total.global_written)} written; distinct "
            f"{amount(counters.unique_read)} and {amount(counters.unique_written)}; "
            f"{counters.traffic_ratio:.2f}x the floor",
        ),
        (
            "coalescing",
            f"{total.sectors} sectors of 32 B in {total.global_requests} requests; ideal {total.ideal_sectors}, "
            f"{total.sector_ratio:.2f}x",
        ),
        (
            "shared memory",
            f"{amount(total.shared_read)} read, {amount(total.shared_written)} written; {total.wavefronts} passes over "
            f"the banks, ideal {total.ideal_wavefronts}, {total.conflict_degree:.2f}x",
        ),
    ]
    if total.flops:
        rows.append(("matrix", ", ".join(f"{k}: {amount(v, 'FLOP')}" for k, v in sorted(total.flops.items()))))
    if total.waits:
        rows.append(("per block", ", ".join(f"{k}: {v:g}" for k, v in sorted(counters.waits_per_block.items()))))
    if counters.peak_async_bytes:
        rows.append(("async copies", f"at most {amount(counters.peak_async_bytes)} in flight in a block"))
    return ["totals", *(f"  {name:14}{text}" for name, text in rows)]


def _arguments(report: Report) -> list[str]:
    rows = [["argument", "size", "read", "distinct", "ratio", "written", "distinct", "ratio"]]
    for b in report.buffers:
        row = [b.name, amount(b.bytes)]
        for moved, unique in ((b.read, b.unique_read), (b.written, b.unique_written)):
            row += [amount(moved), amount(unique), f"{moved / unique:.2f}x"] if unique else ["-", "-", "-"]
        rows.append(row)
    return _table(rows) if len(rows) > 1 else []


def _global_lines(report: Report) -> list[str]:
    rows = [["line", "global bytes", "sectors", "ideal", "ratio", "source"]]
    for site in report.by_line("global")[:LINES]:
        ratio = f"{site.sector_ratio:.2f}x"
        counts = [amount(site.global_bytes), str(site.sectors), str(site.ideal_sectors), ratio]
        rows.append([_line_name(site), *counts, site.place.text])
    return ["global traffic by line, worst coalesced first", *_table(rows)] if len(rows) > 1 else []


def _shared_lines(report: Report) -> list[str]:
    rows = [["line", "shared bytes", "passes", "ideal", "ratio", "source"]]
    for site in report.by_line("shared")[:LINES]:
        if not site.wasted_wavefronts:
            continue
        ratio = f"{site.conflict_degree:.2f}x"
        counts = [amount(site.shared_bytes), str(site.wavefronts), str(site.ideal_wavefronts), ratio]
        rows.append([_line_name(site), *counts, site.place.text])
    return ["bank conflicts by line, worst first", *_table(rows)] if len(rows) > 1 else []


def _line_name(site: Site) -> str:
    place = site.place
    name = str(place.line) if place.line else f"+0x{place.offset:x}"
    return f"{name} {place.inner}".strip()


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned: the first and a last one called "source" to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        for i in range(1, len(row)):
            left = rows[0][i] == "source"
            cells.append(row[i] if left else row[i].rjust(widths[i]))
        lines.append(shortened("  " + "  ".join(cells).rstrip(), WIDTH))
    return lines
