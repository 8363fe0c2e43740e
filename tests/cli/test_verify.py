"""linattn-tl verify: what it counts, what it complains about, and that it exits with 1 if it does."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune import target
from autotune.store import Store
from linattn_tl import cli, loader, packaging, trials
from tests.cli import test_wheel as wheels
from tests.cli.test_wheel import NATIVE, SM, kernel, put

# an empty store of the user's and of the package's, and one with every float32 kernel for this CPU
cache, family = wheels.cache, wheels.family
LAUNCH = "#include <stdlib.h>\nlong linattn_launch(const void* block) { %s }"


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    def run(*argv: str) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = cli.main(["verify", *argv, "--json"])
        out, err = capsys.readouterr()
        assert err == ""
        return code, json.loads(out)

    return run


def counts(report: dict[str, Any], arch: str = NATIVE.arch) -> dict[str, int]:
    """Of an arch, those that are not zero."""
    (found,) = (a for a in report["archs"] if a["arch"] == arch)
    return {name: n for name, n in found.items() if n and name not in ("arch", "MB")}


def complaints(report: dict[str, Any]) -> list[str]:
    return [c["complaint"] for c in report["complaints"]]


def test_nothing_to_complain_about(cache: Store, verify: Any):
    put(cache, kernel("decode"))
    put(cache, kernel("chunk_fwd"))
    put(cache, kernel("chunk_fwd"), which=1, checked=False, verified="no")
    put(cache, kernel("chunk_fwd"), key="ab" * 32)
    put(cache, kernel("chunk_fwd"), key="cd" * 32, arch=NATIVE.arch, config={"C": 1})
    put(cache, kernel("scan", "cuda"), SM)
    code, report = verify()
    assert (code, report["complaints"], report["executed"]) == (0, [], None)
    assert [a["arch"] for a in report["archs"]] == [NATIVE.arch, SM]
    assert counts(report) == {"binaries": 5, "served": 2, "executed": 2, "unchecked": 1, "stale": 2}
    assert counts(report, SM) == {"binaries": 1, "served": 1, "emulated": 1}
    assert report["stores"] == [str(cache.root), str(loader.WHEEL)]


def test_text(cache: Store, capsys: pytest.CaptureFixture[str]):
    put(cache, kernel("decode"))
    put(cache, kernel("scan", "cuda"), SM)
    wheels.damage(cache, put(cache, kernel("chunk_fwd")))
    put(cache, kernel("chunk_bwd_q"), verified="no")
    assert cli.main(["verify"]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == "" and lines[0] == f"3 whole binaries in {cache.root} and {loader.WHEEL}"
    assert lines[1].split() == [
        "arch", "MB", "binaries", "served", "executed", "emulated", "unchecked", "stale", "complaints",
    ]  # fmt: skip
    rows = [line.split() for line in lines[3:6]]
    assert [row[0] for row in rows] == [NATIVE.arch, SM, "all"]
    assert [row[2:] for row in rows] == [
        ["2", "2", "1", "0", "0", "0", "1"],
        ["1", "1", "0", "1", "0", "0", "0"],
        ["3", "3", "1", "1", "0", "0", "1"],
    ]
    assert lines[6:8] == ["", "2 complaints:"]
    assert lines[8].startswith(f"  {cache.root}/bin/") and "is not whole, and no call is served by it" in lines[8]
    assert re.fullmatch(
        rf"  {NATIVE.arch} linear_attention.chunk_bwd_q float32 \w{{12}}: calls are served by it, and it was not "
        r"checked: verified is 'no'",
        lines[9],
    )


def test_empty_stores(cache: Store, verify: Any, capsys: pytest.CaptureFixture[str]):
    assert verify() == (
        0,
        {"stores": [str(cache.root), str(loader.WHEEL)], "archs": [], "executed": None, "complaints": []},
    )
    assert cli.main(["verify"]) == 0
    assert capsys.readouterr().out == f"0 whole binaries in {cache.root} and {loader.WHEEL}\n0 complaints\n"


@pytest.mark.parametrize("suffix", [".so", ".json"])
@pytest.mark.parametrize("spoil", wheels.DAMAGES.values(), ids=wheels.DAMAGES)
def test_damage(cache: Store, verify: Any, spoil: Any, suffix: str):
    put(cache, kernel("decode"))
    bad = put(cache, kernel("chunk_fwd"))
    path = cache.root / "bin" / bad[:2] / f"{bad}{suffix}"
    spoil(path)
    code, report = verify()
    assert counts(report)["served"] == 1
    if suffix == ".json" and not path.exists():  # what a killed build leaves is no damage
        assert (code, report["complaints"]) == (0, [])
    else:
        assert code == 1 and "is not whole" in complaints(report)[0]
        assert report["complaints"][0]["binary"] == str(path.with_suffix(".json"))


def test_the_wheels_binaries_too(cache: Store, verify: Any):
    put(Store(loader.WHEEL), kernel("decode"), flags=("-Wl,-rpath,/opt/lib",))
    put(cache, kernel("chunk_fwd"))
    code, report = verify()
    assert code == 1 and complaints(report) == ["says in which folders to look for libraries"]
    assert counts(report) == {"binaries": 2, "served": 2, "executed": 2, "complaints": 1}


def test_of_stale_binaries_nothing_is_asked(cache: Store, verify: Any):
    put(cache, kernel("chunk_fwd"), key="ab" * 32, flags=("-Wl,-rpath,/opt/lib",), verified="no")
    code, report = verify()
    assert (code, counts(report)) == (0, {"binaries": 1, "stale": 1})


FUNCTION = {"registers": 40, "threads": 256, "smem_bytes": 0, "static_smem_bytes": 0, "spill_bytes": 0}
FAULTS = {
    "spills": ({**FUNCTION, "spill_bytes": 16}, "f spills 16 bytes of registers"),
    "shared": ({**FUNCTION, "smem_bytes": 300_000}, "f needs 300000 bytes of shared memory; sm_90a has 232448"),
    "registers": ({**FUNCTION, "registers": 256}, "f has 256 registers a thread; expected at most 255"),
}


@pytest.mark.parametrize(("function", "words"), FAULTS.values(), ids=FAULTS)
def test_static_checks(cache: Store, verify: Any, function: dict[str, int], words: str):
    put(cache, kernel("scan", "cuda"), SM, functions={"f": function})
    code, report = verify()
    assert (code, complaints(report)) == (1, [words])
    assert report["complaints"][0]["binary"].startswith(f"{SM} linear_attention.scan float32 K=32 V=32 ")


def test_what_a_kernel_expects(cache: Store, verify: Any, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def expects(problem: Any, device: Any) -> tuple[str, ...]:
        asked.append((problem.dtype, problem.K, device.arch))
        return ("HGMMA", "UTMALDG")

    compiled, scan = trials.find_kernel("linear_attention.scan", "cuda")
    monkeypatch.setattr(trials, "find_kernel", lambda *_: (compiled, replace(scan, expects=expects)))
    put(cache, scan, SM, instructions={"HGMMA": 0, "UTMALDG": 3})
    code, report = verify()
    assert (code, complaints(report)) == (1, ["no HGMMA in the machine code; the kernel expects it"])
    assert asked == [("float32", 32, SM)]


def test_one_arch(cache: Store, verify: Any, capsys: pytest.CaptureFixture[str]):
    put(cache, kernel("decode"), verified="no")
    put(cache, kernel("scan", "cuda"), SM)
    assert verify()[0] == 1
    code, report = verify("--arch", SM)
    assert code == 0 and [a["arch"] for a in report["archs"]] == [SM]
    code, report = verify("--arch", f"{SM},{NATIVE.arch}")
    assert code == 1 and [a["arch"] for a in report["archs"]] == [NATIVE.arch, SM]
    assert cli.main(["verify", "--arch", "sm_75"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "'sm_75'" in err and "sm_120a" in err and err.count("\n") == 1


def test_execution(cache: Store, family: Path, verify: Any, monkeypatch: pytest.MonkeyPatch):
    """Of one that is right, one that computes nothing, one that crashes, and one that is no launcher."""
    real = next(e for e in Store(family).entries() if e.manifest["kernel"].endswith("chunk_bwd_kv"))
    place = cache.root / "bin" / real.key[:2]
    place.mkdir(parents=True)
    for suffix in (".so", ".json"):
        shutil.copy(real.path.with_suffix(suffix), place)
    put(cache, kernel("chunk_fwd"), source=LAUNCH % "return 0;")
    put(cache, kernel("chunk_bwd_q"), source=LAUNCH % "abort();")
    put(cache, kernel("decode"))
    put(cache, kernel("decode"), which=1, checked=False, verified="no")  # nobody asks for it
    put(cache, kernel("scan", "cuda"), SM)  # it cannot run here
    assert verify()[0] == 0
    code, report = verify("--execute")
    assert (code, report["executed"]) == (1, 4)
    found = {c["binary"].split()[1].split(".")[1]: c["complaint"] for c in report["complaints"]}
    assert sorted(found) == ["chunk_bwd_q", "chunk_fwd", "decode"]
    assert re.match(r"executed: .*VerificationError", found["chunk_fwd"])
    assert found["chunk_bwd_q"].startswith("executed: ") and "SIGABRT" in found["chunk_bwd_q"]
    assert "linattn_launch" in found["decode"]


def test_only_what_this_cpu_can_run_is_executed(cache: Store, verify: Any, monkeypatch: pytest.MonkeyPatch):
    put(cache, kernel("decode"))
    monkeypatch.setattr(target, "offered", lambda: ())
    code, report = verify("--execute")
    assert (code, report["executed"]) == (0, 0)


def test_progress_needs_no_tqdm(cache: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(__import__("sys").modules, "tqdm", None)
    put(cache, kernel("decode"))
    assert cli.main(["verify"]) == 0
    assert packaging.make_wheel([NATIVE.arch], tmp_path, cli._progress.Bars().show).path.exists()
