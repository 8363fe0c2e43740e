"""The search, with candidates that only pretend to be kernels; and once with real ones, through the command line."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tuner_workers as workers
from tuner_workers import CRASHES, CRASHES_TIMED, HANGS, WRONG, Config, kernel, logged, plan, tune

from autotune import build, table, target, tuner
from linattn_tl import loader
from tl_kernels.linear_attention import cpu as kernels
from tl_kernels.spec import Problem

RIGHTS = tuple(Config(i, us=100 - i) for i in range(3))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TUNER_TEST_DIR", str(tmp_path))
    return tmp_path


def facts(folder: Path, event: str) -> list[dict[str, Any]]:
    return [f for f in tuner.Journal(folder / "journal.jsonl").read() if f["event"] == event]


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def left_behind(folder: Path) -> list[str]:
    """Processes that were started with this folder to work in."""
    mark = f"TUNER_TEST_DIR={folder}\0".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes():
                found.append(process.name)
    return found


# ---- what comes out


def test_the_fastest_of_the_right_ones_wins():
    fast = [Config(0, us=70), Config(1, us=50), Config(2, us=60)]
    report = tune(plan(kernel(*fast), dims=[(64, 64), (128, 256)]))
    assert (report.candidates, report.built, report.found, report.skipped, report.dropped) == (3, 3, 0, 0, [])
    assert [(r["K"], r["V"]) for r in report.rows] == [(64, 64), (128, 256)]
    for row in report.rows:
        assert row["config"] == dataclasses.asdict(fast[1])
        assert (row["kernel"], row["dtype"], row["device"]) == ("imagined.fwd", "float32", "a model")
        assert (row["median_us"], row["gflops"], row["candidates"]) == (50.0, 20.0, 3)
        assert row["tools"] == f"tilelang {build.TILELANG}, g++ {build.tools().version}"


def test_the_best_guesses_of_all_come_first():
    """Whenever time runs out, every kernel and dtype has its best guess."""
    two = [kernel(Config(0), Config(1)), kernel(Config(0), Config(1), name="imagined.bwd")]
    found = tuner.candidates(plan(*two, dtypes=["float32", "bfloat16"]))
    order = [(c.kernel.name, c.problem.dtype, c.config.id) for c in found]
    assert [i for _, _, i in order] == [0] * 4 + [1] * 4
    assert len(set(order[:4])) == 4


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (WRONG, "error: autotune.verify.VerificationError: o has relative RMS error 1.00e+00; expected at most"),
        (CRASHES, "crashed: SIGSEGV"),
        (HANGS, "timeout: took more than 0.5 s"),
    ],
    ids=["wrong", "crashes", "hangs"],
)
def test_what_is_not_right_is_dropped(act: int, why: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Reported and journaled, never timed nor in the table, though it would be the fastest; and not tried again."""
    monkeypatch.setattr(tuner, "BUILD_TIMEOUT_S", 0.5)
    planned = plan(kernel(Config(0, us=50), Config(1, act, us=1), Config(2, us=40)))
    report = tune(planned)
    assert (report.candidates, report.built, report.skipped) == (3, 2, 0)
    (dropped,) = report.dropped
    assert dropped["kernel"] == "imagined.fwd" and "'id': 1" in dropped["config"]
    assert dropped["why"].startswith(why)
    (fact,) = facts(folder, "dropped")
    assert fact["config"]["id"] == 1 and fact["why"] == dropped["why"]
    assert logged("measure") == ["imagined.fwd float32 64x64: 0 2"]
    assert [r["config"]["id"] for r in report.rows] == [2]
    again = tune(planned)
    assert len(logged("make")) == 3 and len(logged("measure")) == 1
    assert again.rows == report.rows


def test_all_wrong_makes_no_row(folder: Path):
    report = tune(plan(kernel(Config(0, WRONG), Config(1, WRONG))))
    assert (len(report.dropped), report.rows, logged("measure")) == (2, [], [])
    tuner.write_table(plan(), report, folder / "table.json")
    assert not (folder / "table.json").exists()


def test_what_was_dropped_on_one_device_is_tried_on_another():
    planned = plan(kernel(Config(0, CRASHES), Config(1)))
    tune(planned)
    tune(dataclasses.replace(planned, device=dataclasses.replace(workers.DEVICE, name="another model")))
    assert logged("make").count("imagined.fwd float32 0") == 2


def test_a_crash_while_timing_is_reported():
    report = tune(plan(kernel(Config(0), Config(1, CRASHES_TIMED)), kernel(Config(0), name="imagined.bwd")))
    assert [r["kernel"] for r in report.rows] == ["imagined.bwd"]
    assert report.dropped or report.skipped


# ---- going on


def killed_midway(folder: Path, event: str, times: int, configs: int) -> None:
    """Starts a real tuning process and kills it once the event has been logged that often."""
    environment = {**os.environ, "PYTHONPATH": str(build.ROOT)}
    command = [sys.executable, workers.__file__, str(configs), "250"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: len(logged(event)) >= times)
    finally:
        process.kill()
        said = process.communicate()
    assert (process.returncode, said) == (-signal.SIGKILL, (b"", b""))
    wait_until(lambda: not left_behind(folder))


def test_killed_while_building_nothing_is_built_twice(folder: Path):
    killed_midway(folder, "made", 3, configs=8)
    stored = {entry.path.read_text() for entry in workers.store().entries()}
    begun = logged("make")
    assert 3 <= len(stored) < 8
    report = tune(workers.slow_plan(8, 250))
    resumed = logged("make")[len(begun) :]
    assert sorted(resumed) == sorted({f"imagined.fwd float32 {i}" for i in range(8)} - stored)
    assert (report.found, report.built, report.dropped) == (len(stored), 8 - len(stored), [])
    assert [(r["K"], r["config"]["id"]) for r in report.rows] == [(16 * (i + 1), 0) for i in range(8)]


def test_killed_while_timing_nothing_is_timed_twice(folder: Path):
    killed_midway(folder, "measure", 3, configs=4)
    timed = {(f["row"]["K"], f["row"]["V"]) for f in facts(folder, "timed")}
    assert len(timed) == 2  # one after the other, and the third had begun
    begun = logged("measure")
    report = tune(workers.slow_plan(4, 250))
    resumed = [line.split()[2] for line in logged("measure")[len(begun) :]]
    assert resumed == [f"{K}x16:" for K in (16, 32, 48, 64) if (K, 16) not in timed]
    assert [r["K"] for r in report.rows] == [16, 32, 48, 64]
    assert (report.built, len(logged("make"))) == (0, 4)


@pytest.mark.parametrize("cut", ["", '{"event": "dropped", "ke', "null\n", "[1]\n", "\0\0\0\0", "\udcff{\n"])
def test_a_damaged_line_costs_itself_only(cut: str, folder: Path):
    journal = tuner.Journal(folder / "journal.jsonl")
    journal.append({"event": "first"})
    with journal.path.open("a", errors="surrogateescape") as file:
        file.write(cut)
    journal.append({"event": "last"})
    assert [f["event"] for f in journal.read()] == ["first", "last"]


def test_a_timing_cut_short_is_taken_again(folder: Path):
    planned = plan(kernel(*RIGHTS), dims=[(16, 16), (32, 32)])
    tune(planned)
    path = folder / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    report = tune(planned)
    assert logged("measure")[2:] == ["imagined.fwd float32 32x32: 0 1 2"]
    assert [r["K"] for r in report.rows] == [16, 32]
    assert len(facts(folder, "timed")) == 2


def test_a_journal_that_is_not_there_is_empty(folder: Path):
    assert list(tuner.Journal(folder / "deep" / "journal.jsonl").read()) == []


# ---- the budget


def test_past_the_deadline_nothing_starts_and_a_second_run_finishes():
    """One job, and a first candidate that outlasts the budget."""
    slow = [Config(0, sleep_ms=1200), *(Config(i) for i in range(1, 6))]
    planned = plan(kernel(*slow), jobs=1, budget_s=1.0)
    report = tune(planned)
    assert (report.built, report.skipped, report.dropped, report.rows) == (1, 5 + 1, [], [])  # and the one group
    assert logged("make") == ["imagined.fwd float32 0"]
    assert logged("measure") == []
    quick = dataclasses.replace(planned, budget_s=300.0)
    report = tune(quick)
    assert (report.built, report.found, report.skipped) == (5, 1, 0)
    assert len(logged("make")) == 6
    assert len(report.rows) == 1


def test_no_budget_does_nothing():
    report = tune(plan(kernel(*RIGHTS), budget_s=0.0))
    assert (report.candidates, report.built, report.skipped, logged("make")) == (3, 0, 3, [])


def test_timings_left_for_lack_of_time_are_counted():
    planned = plan(kernel(*RIGHTS))
    tune(planned)
    other_size = dataclasses.replace(planned, dims=[(32, 32)], budget_s=0.0)
    report = tune(other_size)
    assert (report.found, report.rows) == (3, [])
    assert report.skipped > 0


# ---- R12: what was not checked is not used


def test_after_an_unchecked_run_everything_is_checked(folder: Path):
    configs = (Config(0, us=50), Config(1, WRONG, us=1), Config(2, us=40))
    path = folder / "table.json"
    unchecked = plan(kernel(*configs), checked=False)
    report = tune(unchecked)
    assert (report.built, report.dropped, [r["config"]["id"] for r in report.rows]) == (3, [], [1])
    tuner.write_table(unchecked, report, path)
    assert not path.exists()
    assert (len(logged("make")), len(logged("measure"))) == (3, 1)

    checked = dataclasses.replace(unchecked, checked=True)
    report = tune(checked)
    assert (report.built, report.found) == (2, 0)
    assert [d["config"] for d in report.dropped] == [str(dataclasses.asdict(configs[1]))]
    assert (len(logged("make")), len(logged("measure"))) == (6, 2)
    tuner.write_table(checked, report, path)
    assert [r["config"]["id"] for r in table.read_rows(path)] == [2]

    tuner.write_table(unchecked, tune(unchecked), path)
    assert [r["config"]["id"] for r in table.read_rows(path)] == [2]
    assert (len(logged("make")), len(logged("measure"))) == (6, 2)


def test_what_failed_unchecked_is_tried_when_checked():
    unchecked = plan(kernel(Config(0, CRASHES), Config(1)), checked=False)
    tune(unchecked)
    tune(dataclasses.replace(unchecked, checked=True))
    assert logged("make").count("imagined.fwd float32 0") == 2


def test_an_unchecked_binary_is_never_served(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LINATTN_TL_CACHE_DIR", str(folder))
    monkeypatch.setattr(build, "build", lambda *a: a[-1].write_bytes(b"x") and {"config": vars(a[2])})
    problem = Problem("linear_attention", "float32", 64, 64)
    device = target.offered()[0]
    for config in kernels.FWD.configs(problem, device):
        loader.build_and_store(kernels.FWD, problem, device, None, config)
        assert loader.find(kernels.FWD, problem, device) is None
        with pytest.raises(FileNotFoundError):
            loader.stored_binary(kernels.FWD, problem, device, config)


def test_what_was_never_executed_is_checked_before_it_is_served(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Built for a level that the building machine lacks, and found on one that has it."""
    monkeypatch.setenv("LINATTN_TL_CACHE_DIR", str(folder))
    monkeypatch.setattr(build, "build", lambda *a: a[-1].write_bytes(b"x") and {"config": vars(a[2])})
    problem, here = Problem("linear_attention", "float32", 64, 64), target.offered()[0]
    with monkeypatch.context() as patch:
        patch.setattr(target, "offered", lambda: ())
        loader.build_and_store(kernels.FWD, problem, here, lambda *_: None, kernels.FWD.configs(problem, here)[0])
    assert loader.find(kernels.FWD, problem, here) is None


# ---- what a timing depends on


CHANGES: dict[str, Callable[[tuner.Plan, pytest.MonkeyPatch], tuner.Plan]] = {
    "device": lambda p, _: dataclasses.replace(p, device=dataclasses.replace(p.device, name="another model")),
    "arch": lambda p, _: dataclasses.replace(p, device=dataclasses.replace(p.device, arch="cpu-v4")),
    "compiler": lambda p, patch: (patch.setattr(build, "tools", lambda: build.Tools("", "g++", "99.0.0")), p)[1],
    "source": lambda p, patch: (patch.setattr(build, "fingerprint", lambda op: "another"), p)[1],
    "dtype": lambda p, _: dataclasses.replace(p, dtypes=["bfloat16"]),
    "K": lambda p, _: dataclasses.replace(p, dims=[(32, 64)]),
    "V": lambda p, _: dataclasses.replace(p, dims=[(64, 32)]),
    "direction": lambda p, _: dataclasses.replace(p, kernels=[kernel(*RIGHTS, name="imagined.bwd")]),
    "configs": lambda p, _: dataclasses.replace(p, kernels=[kernel(*RIGHTS[:2])]),
    "checked": lambda p, _: dataclasses.replace(p, checked=False),
}
SAME: dict[str, Callable[[tuner.Plan], tuner.Plan]] = {
    "nothing": lambda p: p,
    "order of configs": lambda p: dataclasses.replace(p, kernels=[kernel(*reversed(RIGHTS))]),
    "jobs, budget": lambda p: dataclasses.replace(p, jobs=1, budget_s=200.0),
    "cores": lambda p: dataclasses.replace(p, device=dataclasses.replace(p.device, cores=1)),
}


def everything_built(planned: tuner.Plan, folder: Path) -> tuner.Report:
    journal = tuner.Journal(folder / "journal.jsonl")
    return tuner.tune(planned, workers.WORKERS, journal=journal, has_binary=lambda *_: True, progress=lambda *_: None)


def test_a_timing_holds_for_what_it_was_taken_with(folder: Path, monkeypatch: pytest.MonkeyPatch):
    base = plan(kernel(*RIGHTS))
    assert len(everything_built(base, folder).rows) == 1
    assert len(logged("measure")) == 1
    for name, same in SAME.items():
        assert len(everything_built(same(base), folder).rows) == 1
        assert len(logged("measure")) == 1, f"{name}: timed again"
    for count, (name, change) in enumerate(CHANGES.items(), start=2):
        with monkeypatch.context() as patch:
            assert len(everything_built(change(base, patch), folder).rows) == 1
        assert len(logged("measure")) == count, f"another {name}: not timed again"
    assert len(everything_built(base, folder).rows) == 1
    assert len(logged("measure")) == 1 + len(CHANGES)


# ---- real kernels


SCRIPT = """
import dataclasses
from linattn_tl import cli, trials

def few(kernel, count):
    configs = kernel.configs
    return dataclasses.replace(kernel, configs=lambda problem, target: configs(problem, target)[:count])

def all_kernels(device, every=trials.all_kernels):
    return [few(k, 2) if k.name.endswith("chunk_fwd") else few(k, 1) for k in every(device)
            if k.name.endswith(("chunk_fwd", "decode"))]

trials.all_kernels = all_kernels
raise SystemExit(cli.main())
"""


def tune_for_real(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    script = folder / "tune_few.py"
    script.write_text(SCRIPT)
    only = ["--dtypes", "float32", "--dims", "16", "--ops", "linear_attention"]
    command = [sys.executable, str(script), "tune", *only, "--json", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(build.ROOT), "LINATTN_TL_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_tuning_real_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Two configs of the forward kernel and one of decode: built, checked, timed, kept, served; and not built again."""
    report, said = tune_for_real(folder, "--budget", "300")
    assert (report["candidates"], report["built"], report["found"]) == (3, 3, 0)
    assert (report["skipped"], report["dropped"]) == (0, [])
    assert "build and check" in said and "time the survivors" in said
    rows = {r["kernel"]: r for r in report["rows"]}
    assert sorted(rows) == ["linear_attention.chunk_fwd", "linear_attention.decode"]
    for row in rows.values():
        assert (row["dtype"], row["K"], row["V"]) == ("float32", 16, 16)
        assert row["median_us"] > 0
    assert rows["linear_attention.chunk_fwd"]["gflops"] > 0.1

    path = Path(report["table"])
    assert json.loads(path.read_text())["rows"] == sorted(report["rows"], key=table.row_key)
    monkeypatch.setenv("LINATTN_TL_CACHE_DIR", str(folder / "cache"))
    entries = list(loader.user_store().entries())
    assert len(entries) == 3
    assert {e.manifest["verified"] for e in entries} == {"executed against the float64 definition"}
    assert_served_by_the_table(path)

    again, _ = tune_for_real(folder, "--budget", "300")
    assert (again["candidates"], again["built"], again["found"]) == (3, 0, 3)
    assert sorted(again["rows"], key=table.row_key) == table.read_rows(path)
    assert [e.path.stat().st_mtime_ns for e in entries] == [
        e.path.stat().st_mtime_ns for e in loader.user_store().entries()
    ]


def assert_served_by_the_table(path: Path) -> None:
    """The loader takes the config of the row, whichever that is."""
    problem = Problem("linear_attention", "float32", 16, 16)
    rows = table.read_rows(path)
    device = target.offered()[0]
    configs = [vars(c) for c in kernels.FWD.configs(problem, device)[:2]]
    (at,) = (i for i, r in enumerate(rows) if r["kernel"] == kernels.FWD.name)
    for config in (rows[at]["config"], *configs):
        table.write_rows(path, path.stem, [{**r, "config": config} if i == at else r for i, r in enumerate(rows)])
        found = loader.find(kernels.FWD, problem, device)
        assert found is not None and found.entry.manifest["config"] == config == vars(found.config)
    table.write_rows(path, path.stem, rows)
