"""Reports: the runtime's JSON to findings and counters by source line, and to text."""

import ctypes
import json
import shutil
import subprocess

import pytest

from autotune.emulator import places
from autotune.emulator.places import Place, parse_frames, resolve
from autotune.emulator.report import NotCleanError, Site, merge, parse, pcs_of
from autotune.emulator.screen import WIDTH, amount, shortened

needs_binutils = pytest.mark.skipif(not shutil.which("addr2line") or not shutil.which("g++"), reason="needs binutils")

LINE_71 = Place(71, "x = ((half_t*)q)[0];", "", 0x471)
LINE_88 = Place(88, "((half_t*)q)[i] = x;", "", 0x488)
PLACES = {0x471: LINE_71, 0x488: LINE_88, 0x489: Place(88, LINE_88.text, "", 0x489)}


def finding(**changes):
    entry = {
        "kind": "race",
        "message": "write of shared+0x1f40 after an unsynchronised read",
        "kernel": "main_kernel",
        "block": [0, 1, 0],
        "thread": 37,
        "pc": 0x488,
        "other_thread": 3,
        "other_block": [0, 1, 0],
        "other_pc": 0x471,
        "count": 12,
    }
    return {**entry, **changes}


def site(pc, **changes):
    counts = ("global_read", "global_written", "global_requests", "sectors", "ideal_sectors", "shared_read")
    counts += ("shared_written", "shared_requests", "wavefronts", "ideal_wavefronts")
    return {"pc": pc, **dict.fromkeys(counts, 0), "flops": {}, "waits": {}, **changes}


def results(**changes):
    whole = {
        "findings": [],
        "waits": [],
        "stopped": False,
        "blocks": 2,
        "switches": 99,
        "peak_async_bytes": 16384,
        "launches": [{"kernel": "main_kernel", "grid": [1, 2, 1], "block": [128, 1, 1], "shared_bytes": 65536}],
        "buffers": [
            {"name": "Q", "bytes": 4096, "read": 8192, "written": 0, "unique_read": 4096, "unique_written": 0},
            {"name": "O", "bytes": 4096, "read": 0, "written": 4096, "unique_read": 0, "unique_written": 4096},
        ],
        "sites": [
            site(0x471, global_read=8192, global_requests=64, sectors=512, ideal_sectors=256, waits={"bar.sync": 4}),
            site(0x488, shared_written=2048, wavefronts=64, ideal_wavefronts=16, flops={"mma.m16n8k16": 1e6}),
            site(0x489, global_written=4096, global_requests=32, sectors=128, ideal_sectors=128),
        ],
    }
    return {**whole, **changes}


def parsed(**changes):
    return parse(results(**changes), PLACES, kernel="fwd", arch="sm_90a", schedule="late, ascending", seconds=0.25)


# ---- findings


def test_a_race_reads_as_a_sentence():
    report = parsed(findings=[finding()])
    assert str(report.findings[0]) == (
        "race: write of shared+0x1f40 by thread 37 (line 88) after an unsynchronised read by thread 3 (line 71), "
        "block (0,1,0), 12 times"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"other_block": [0, 0, 0], "message": "write of O at byte 8 after an unsynchronised write", "count": 1},
            "race: write of O at byte 8 by thread 37 (line 88) after an unsynchronised write by thread 3 (line 71) "
            "of block (0,0,0), block (0,1,0)",
        ),
        (
            {"kind": "uninitialised", "message": "read of shared+0x40, which nobody has written"}
            | {"other_thread": -1, "other_pc": 0},
            "uninitialised: read of shared+0x40, which nobody has written, by thread 37 (line 88), block (0,1,0), "
            "12 times",
        ),
        (
            {"kind": "in_flight", "message": "read of shared+0x40 while a copy into it is in flight"},
            "in_flight: read of shared+0x40 while a copy into it is in flight, by thread 37 (line 88); the other side "
            "is thread 3 (line 71), block (0,1,0), 12 times",
        ),
        (
            {"kind": "deadlock", "message": "no thread can run", "thread": -1, "pc": 0, "count": 1}
            | {"other_thread": -1, "other_pc": 0},
            "deadlock: no thread can run",
        ),
        (
            {"kind": "leak", "message": "never waited for", "thread": -1, "other_thread": -1, "other_pc": 0},
            "leak: never waited for, at line 88, 12 times",
        ),
        (
            {"pc": 0x5000, "count": 1},
            "race: write of shared+0x1f40 by thread 37 (code +0x5000) after an unsynchronised read by thread 3 "
            "(line 71), block (0,1,0)",
        ),
    ],
    ids=["other block", "one side", "two sides", "nowhere", "no thread", "unknown line"],
)
def test_sentences(changes, words):
    assert str(parsed(findings=[finding(**changes)]).findings[0]) == words


def test_findings_of_the_same_lines_are_one():
    report = parsed(findings=[finding(), finding(pc=0x489, message="write of shared+0x1f44 after a read")])
    assert [f.count for f in report.findings] == [24]
    assert len(parsed(findings=[finding(), finding(kind="proxy")]).findings) == 2


def test_findings_without_a_place_are_told_apart_by_their_words():
    nowhere = {"pc": 0, "other_pc": 0}
    report = parsed(findings=[finding(**nowhere), finding(**nowhere, message="other"), finding(**nowhere)])
    assert [f.count for f in report.findings] == [24, 12]


def test_clean():
    report = parsed()
    assert report.clean
    assert report.assert_clean() is report
    assert str(report).startswith("clean -- fwd on sm_90a, 2 blocks, 0.25 s\n")


def test_not_clean_says_all():
    report = parsed(findings=[finding(), finding(kind="proxy")])
    with pytest.raises(NotCleanError) as error:
        report.assert_clean()
    assert isinstance(error.value, AssertionError)
    text = str(error.value)
    assert text == str(report)
    assert text.startswith("NOT CLEAN: 1 race, 1 proxy -- fwd on sm_90a")
    assert "    line 88: ((half_t*)q)[i] = x;\n    line 71: x = ((half_t*)q)[0];\n" in text


def test_ended_early_is_not_clean():
    report = parsed(stopped=True)
    assert not report.clean
    assert "NOT CLEAN: ended early" in str(report)
    assert "outputs and counters are incomplete" in str(report)


def test_deadlock_says_who_waits():
    report = parsed(waits=[{"threads": "0-31", "in": "bar.sync 1: 96 of 128 arrived", "pc": 0x471}], stopped=True)
    assert "  threads 0-31 wait in bar.sync 1: 96 of 128 arrived (line 71)\n    line 71: x = " in str(report)


def test_many_findings_stay_on_the_screen():
    report = parsed(findings=[finding(pc=0x9000 + i) for i in range(40)])
    assert "and 28 more findings, in report.findings" in str(report)
    assert len(str(report).splitlines()) < 70


# ---- counters


def test_accesses_of_one_line_are_one_site():
    report = parsed()
    assert [s.place.line for s in report.sites] == [71, 88]
    merged = report.sites[1]
    assert (merged.global_written, merged.shared_written, merged.flops) == (4096, 2048, {"mma.m16n8k16": 1e6})


def test_unknown_lines_stay_apart():
    report = parsed(sites=[site(0x7000, global_read=1), site(0x8000, global_read=2)])
    assert [(s.place.offset, s.global_read) for s in report.sites] == [(0x7000, 1), (0x8000, 2)]
    assert "+0x8000" in str(report)


def test_a_header_is_named_while_all_accesses_are_in_it():
    at = {1: Place(5, "f();", "reduce.h:9", 1), 2: Place(5, "f();", "reduce.h:9", 2), 3: Place(5, "f();", "", 3)}
    one = parse(results(sites=[site(1), site(2)]), at)
    assert [s.place.inner for s in one.sites] == ["reduce.h:9"]
    mixed = parse(results(sites=[site(1), site(3)]), at)
    assert [s.place.inner for s in mixed.sites] == [""]


def test_totals():
    counters = parsed().counters
    assert (counters.total.global_read, counters.total.global_written) == (8192, 4096)
    assert counters.global_bytes == 12288
    assert counters.unique_bytes == 8192
    assert counters.traffic_ratio == 1.5
    assert counters.total.sector_ratio == pytest.approx(640 / 384)
    assert counters.total.conflict_degree == 4.0
    assert counters.flops == {"mma.m16n8k16": 1e6}
    assert counters.waits_per_block == {"bar.sync": 2.0}
    assert counters.peak_async_bytes == 16384


def test_summing_leaves_the_sites_alone():
    report = parsed()
    before = report.to_dict()
    assert report.counters.to_dict() == report.counters.to_dict()
    assert report.to_dict() == before


def test_worst_line_first():
    report = parsed()
    assert [s.place.line for s in report.by_line()] == [71, 88]
    assert [s.place.line for s in report.by_line("shared")] == [88]
    with pytest.raises(ValueError, match="worst is 'flops'; expected 'global' or 'shared'"):
        report.by_line("flops")


def test_the_floor_of_nothing_is_one():
    assert Site().sector_ratio == Site().conflict_degree == 1.0
    counters = parsed(sites=[], buffers=[]).counters
    assert counters.traffic_ratio == 1.0


def test_tables():
    text = str(parsed())
    assert "8.0 KiB read, 4.0 KiB written; distinct 4.0 KiB and 4.0 KiB; 1.50x the floor" in text
    assert "640 sectors of 32 B in 96 requests; ideal 384, 1.67x" in text
    assert "mma.m16n8k16: 1.0 MFLOP" in text
    assert "per block     bar.sync: 2" in text
    assert "at most 16.0 KiB in flight in a block" in text
    assert "launch main_kernel grid (1,2,1) block (128,1,1) shared 65536 B" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith("  Q ")}
    assert rows["Q"] == ["Q", "4.0", "KiB", "8.0", "KiB", "4.0", "KiB", "2.00x", "-", "-", "-"]


def test_long_source_lines_do_not_break_the_screen():
    long = Place(7, "y" * 1000, "", 7)
    values = results(findings=[finding(pc=7)], sites=[site(7, global_read=64, sectors=4, ideal_sectors=2)])
    lines = str(parse(values, {7: long})).splitlines()
    source = [line for line in lines if "yyy" in line]
    assert len(source) == 2
    assert max(map(len, source)) <= WIDTH


def test_not_counted_shows_no_tables():
    assert "totals" not in str(parsed(sites=[]))


@pytest.mark.parametrize(
    ("count", "unit", "text"),
    [
        (0, "B", "0 B"),
        (1536, "B", "1.5 KiB"),
        (3 << 40, "B", "3.0 TiB"),
        (3 << 50, "B", "3072.0 TiB"),
        (2.1e6, "FLOP", "2.1 MFLOP"),
    ],
)
def test_amounts(count, unit, text):
    assert amount(count, unit) == text


def test_shortened():
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefg", 6) == "abc..."
    assert len(shortened("abcdefg", 3)) == 3


def test_json_round_trip():
    report = parsed(findings=[finding()])
    plain = json.loads(report.as_json())
    assert plain["clean"] is False
    assert plain["findings"][0]["place"]["line"] == 88
    assert plain["counters"]["traffic_ratio"] == 1.5
    assert "place" not in plain["counters"]


# ---- several schedules


def test_merge_keeps_each_finding_once():
    first = parsed(findings=[finding()])
    second = parse(
        results(findings=[finding(), finding(kind="proxy")], peak_async_bytes=99999), PLACES, schedule="early, greedy"
    )
    both = merge([first, second])
    assert [(f.kind, f.count, f.schedule) for f in both.findings] == [
        ("race", 24, "late, ascending"),
        ("proxy", 12, "early, greedy"),
    ]
    assert both.schedules == ["late, ascending", "early, greedy"]
    assert both.peak_async_bytes == 99999
    assert both.counters.global_bytes == first.counters.global_bytes
    assert "[early, greedy]" in str(both)
    assert not merge([parsed(), parsed(stopped=True)]).clean


# ---- code offsets to lines


def test_pcs():
    values = results(findings=[finding(other_pc=0)], waits=[{"threads": "0", "in": "x", "pc": 5}], sites=[site(6)])
    assert pcs_of(values) == {0x488, 5, 6}


def test_frames():
    text = (
        "0x0000000000001139\n/a/emu/memory.h:12\n/tl/reduce.h:50 (discriminator 3)\n/b/k.cu:7\n0x10\n??:0\n0x12\n??:?\n"
    )
    frames = parse_frames(text)
    assert frames == {
        0x1139: [("/a/emu/memory.h", 12), ("/tl/reduce.h", 50), ("/b/k.cu", 7)],
        0x10: [("??", 0)],
        0x12: [],
    }


def test_without_binutils_lines_are_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(places.shutil, "which", lambda name: None)
    assert resolve(tmp_path / "k.so", [1, 2], "") == {}
    assert "code +0x488" in str(parse(results(findings=[finding()]), {}))


@needs_binutils
def test_what_addr2line_cannot_read_is_unknown(tmp_path):
    (tmp_path / "k.so").write_text("not an object")
    assert resolve(tmp_path / "k.so", [1, 2], "") == {}


@needs_binutils
def test_the_kernels_line_is_the_outermost_frame(tmp_path):
    """Return addresses of calls: one in the kernel, one in a header inlined into the kernel's next line."""
    (tmp_path / "reduce.h").write_text(
        "extern char *at[2];\nvoid here(int i);\n"
        "static inline __attribute__((always_inline)) void inlined() {\n  here(1);\n}\n"
    )
    source = (
        '#include "reduce.h"\n'
        "char *at[2];\n"
        "__attribute__((noinline)) void here(int i) { at[i] = (char *)__builtin_return_address(0); }\n"
        'extern "C" long base() { return (long)&at; }\n'
        'extern "C" void kernel() {\n'
        "  here(0);\n"
        "  inlined();\n"
        '  asm volatile("");\n'
        "}\n"
        'extern "C" long place(int i) { return (long)at[i]; }\n'
    )
    (tmp_path / "k.cu").write_text(source)
    command = ["g++", "-x", "c++", "-O1", "-g1", "-shared", "-fPIC", str(tmp_path / "k.cu"), "-o", "k.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "k.so"))
    library.base.restype = library.place.restype = ctypes.c_long
    library.kernel()
    symbols = subprocess.run(["nm", tmp_path / "k.so"], capture_output=True, text=True, check=True).stdout
    offset = next(int(row.split()[0], 16) for row in symbols.splitlines() if row.split()[-1] == "at")
    load = library.base() - offset
    first, second = (library.place(i) - load for i in (0, 1))
    found = resolve(tmp_path / "k.so", [first, second], source)
    assert found[first] == Place(6, "here(0);", "", first)
    assert found[second] == Place(7, "inlined();", "reduce.h:4", second)
    assert str(found[second]) == "line 7, reduce.h:4"
