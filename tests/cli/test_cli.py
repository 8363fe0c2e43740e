"""The command line: exit codes, text that fits a terminal, JSON that parses, and errors of one line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune import build, table, target
from autotune.pool import Outcome
from autotune.tuner import Report
from linattn_tl import cli, loader, registry, tuning
from tl_kernels.spec import DTYPES

WIDEST = 160
OPS = sorted(registry.all_ops())
NATIVE = target.offered()[0].arch
KERNELS = sorted(k.name for op in registry.all_ops().values() for k in op.compiled["cpu"].kernels)

Said = tuple[int, str, str]  # exit code, stdout, stderr


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*argv: str) -> Said:
        capsys.readouterr()
        code = cli.main(argv)
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_choices: None) -> Path:
    monkeypatch.setenv("LINATTN_TL_CACHE_DIR", str(tmp_path))
    return tmp_path


def check_text(text: str, tables: int = 0) -> None:
    """Fits, and every cell of a table stands in its column: the line of dashes says where the gaps are."""
    lines = text.splitlines()
    assert lines and max(map(len, lines)) <= WIDEST, max(lines, key=len)
    assert all(line == line.rstrip() for line in lines)
    rulers = [i for i, line in enumerate(lines) if re.fullmatch(r"-+(  -+)*", line)]
    assert len(rulers) == tables
    for i in rulers:
        rows = [lines[i - 1]]
        for line in lines[i + 1 :]:
            if not line:
                break
            rows.append(line)
        ruler = lines[i]
        gaps = [at for at, sign in enumerate(ruler) if sign == " "]
        for row in rows:
            padded = row.ljust(len(ruler))
            assert len(padded) == len(ruler), row
            assert not any(padded[at].strip() for at in gaps), row


def error(said: Said, command: str) -> str:
    """The error: one line that names the command, nothing on stdout, exit code 1."""
    code, out, err = said
    assert (code, out) == (1, "")
    assert err.count("\n") == 1 and err.endswith("\n")
    assert err.startswith(f"linattn-tl {command}: ")
    return err


# ---- doctor


def test_doctor(say: Any, binaries: None):
    code, text, err = say("doctor")
    assert (code, err) == (0, "")
    check_text(text, tables=1)
    code, out, err = say("doctor", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["levels"] == [t.arch for t in target.offered()]
    assert report["compiler"] == f"tilelang {build.TILELANG}, g++ {build.tools().version}"
    assert report["binaries"] == len(list(loader.user_store().entries())) > 0
    assert sorted(report["served"]) == sorted(f"{op} {dtype} cpu" for op in OPS for dtype in DTYPES)
    assert {found["backend"] for found in report["served"].values()} == {"binary"}
    for name in ("python", "torch", "cache", "cpu"):
        assert str(report[name]) in text
    rows = [line.split() for line in text.splitlines()[-len(OPS) * len(DTYPES) :]]
    assert sorted(rows) == sorted([op, dtype, "cpu", "binary"] for op in OPS for dtype in DTYPES)


def test_doctor_without_binaries_says_what_to_do(say: Any, empty_cache: Path):
    code, text, _ = say("doctor")
    assert code == 0
    check_text(text, tables=1)
    assert text.count("not built yet; `linattn-tl tune` does it") == len(OPS) * len(DTYPES)
    assert str(empty_cache) in text
    report = json.loads(say("doctor", "--json")[1])
    assert report["binaries"] == 0
    for found in report["served"].values():
        assert found["backend"] == "jit"
        assert "`linattn-tl tune` builds them" in found["reasons"]["binary"]


def test_doctor_of_a_dim_that_no_kernel_has(say: Any, binaries: None):
    code, text, _ = say("doctor", "--dim", "300")
    assert code == 0
    check_text(text, tables=1)
    assert "head dims above 256 have no kernel" in text and "at K = V = 300" in text
    report = json.loads(say("doctor", "--dim", "300", "--json")[1])
    assert {found["backend"] for found in report["served"].values()} == {"torch"}


# ---- show


def test_show(say: Any, binaries: None):
    code, text, err = say("show")
    assert (code, err) == (0, "")
    report = json.loads(say("show", "--json")[1])
    check_text(text, tables=1 + bool(report["tuned"]))
    entries = list(loader.user_store().entries())
    assert sorted(b["key"] for b in report["binaries"]) == sorted(e.key for e in entries)
    assert text.startswith(f"{len(entries)} binaries in {report['cache']}")
    assert {b["kernel"] for b in report["binaries"]} >= set(KERNELS)
    for name in KERNELS:
        assert name in text


def test_show_one_arch(say: Any, binaries: None):
    every = json.loads(say("show", "--json")[1])["binaries"]
    for arch in target.CPU_ARCHS:
        some = json.loads(say("show", "--arch", arch, "--json")[1])["binaries"]
        assert some == [b for b in every if b["arch"] == arch]
    assert json.loads(say("show", "--arch", NATIVE, "--json")[1])["binaries"]


def test_show_an_empty_cache(say: Any, empty_cache: Path):
    code, text, _ = say("show")
    assert code == 0
    check_text(text)
    assert text.startswith("0 binaries") and "`linattn-tl tune` makes them" in text
    report = json.loads(say("show", "--json")[1])
    assert (report["binaries"], report["cache"]) == ([], str(empty_cache))


ROWS = [
    {
        "kernel": kernel,
        "dtype": "bfloat16",
        "K": K,
        "V": 256,
        "config": {"C": 32, "MR": 4, "NR": 32},
        "median_us": 123456.7,
        "gflops": gflops,
        "candidates": 5,
    }
    for kernel, K, gflops in (("linear_attention.chunk_bwd_kv", 8, 70.1), ("linear_attention.decode", 128, 0.0))
]


def test_show_tuned_rows(say: Any, empty_cache: Path):
    table.write_rows(empty_cache / "tables" / "cpu-v3.json", "cpu-v3", ROWS)
    code, text, _ = say("show")
    assert code == 0
    check_text(text, tables=1)
    (first, second) = text.splitlines()[-2:]
    assert first.split()[:5] == ["cpu-v3", "linear_attention.chunk_bwd_kv", "bfloat16", "8", "256"]
    assert first.split()[5:] == ["C=32", "MR=4", "NR=32", "123456.7", "70.1"]
    assert second.split()[-1] == "-"  # bytes bound it
    tuned = json.loads(say("show", "--json")[1])["tuned"]
    assert [r for r in tuned if r["arch"] == "cpu-v3"][:2] == [{**row, "arch": "cpu-v3"} for row in ROWS]


# ---- explain


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_explain(say: Any, binaries: None, op: str, dtype: str):
    code, text, err = say("explain", op, "--dtype", dtype)
    assert (code, err) == (0, "")
    check_text(text)
    backend = "binary" if dtype in DTYPES else "torch"
    assert text.splitlines()[0] == f"{op}  {dtype}  K=64 V=64  cpu: {backend} serves this call"
    code, out, _ = say("explain", op, "--dtype", dtype, "--json")
    report = json.loads(out)
    assert (code, report["op"], report["backend"]) == (0, op, backend)
    assert list(report["reasons"]) == ["binary", "jit", "cupy", "torch"]
    for name, reason in report["reasons"].items():
        assert f"  {name:<8}{reason}\n" in text


def test_explain_head_dims(say: Any, binaries: None):
    text = say("explain", "linear_attention", "--K", "300", "--V", "8")[1]
    assert "K=300 V=8" in text and "head dims above 256" in text
    assert "K=48 V=48  cpu: binary" in say("explain", "linear_attention", "--K", "48")[1]


def test_explain_where_nothing_serves_exits_with_1(say: Any, empty_cache: Path):
    code, text, _ = say("explain", "linear_attention", "--backend", "binary")
    assert code == 1
    check_text(text)
    assert "nothing serves this call" in text and "`linattn-tl tune` builds them" in text
    code, out, _ = say("explain", "linear_attention", "--backend", "binary", "--json")
    assert (code, json.loads(out)["backend"]) == (1, None)


# ---- tune


def test_tune_help(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        cli.main(["tune", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    check_text(text)
    for option in ("--arch", "--budget", "--dtypes", "--dims", "--ops", "--jobs", "--fresh", "--skip-verify", "--json"):
        assert option in text


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]):
    names = [command.NAME for command in cli.commands()]
    assert names[:6] == ["doctor", "tune", "build", "show", "verify", "wheel"]
    for name in names:
        with pytest.raises(SystemExit) as stop:
            cli.main([name, "--help"])
        assert stop.value.code == 0
        assert "--json" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(f"{command.NAME} " in text and command.HELP in " ".join(text.split()) for command in cli.commands())


def test_tune_without_time_says_to_run_it_again(say: Any, empty_cache: Path):
    arguments = ("tune", "--budget", "0", "--dims", "16,32x64", "--dtypes", "float32")
    code, text, _ = say(*arguments)
    assert code == 1
    check_text(text, tables=1)
    assert "run it again to go on" in text
    assert re.search(r"^(\d+) candidates .* 0 built, 0 already there, 0 dropped .*, \1 left for lack", text, re.M)
    code, out, _ = say(*arguments, "--json")
    report = json.loads(out)
    assert (code, report["rows"], report["skipped"]) == (1, [], report["candidates"])


def test_tune_prints_what_it_found(say: Any, empty_cache: Path, monkeypatch: pytest.MonkeyPatch):
    why = "error: autotune.verify.VerificationError: wrong"
    dropped = {"kernel": ROWS[0]["kernel"], "dtype": "float16", "config": "{'C': 64}", "why": why}
    report = Report(17, 3, 12, 1, [dropped], ROWS, 61.4)
    seen = []

    def run(plan: Any, **options: Any) -> Any:
        seen.append((plan, options["fresh"]))
        options["progress"]("build", 1, 2)
        options["progress"]("time", 2, 2)
        return report, empty_cache / "table.json"

    monkeypatch.setattr(tuning, "run", run)
    code, text, err = say("tune", "--dims", "16,32x64", "--dtypes", "float32,float16", "--jobs", "3", "--fresh")
    assert code == 0
    check_text(text, tables=1)
    assert "17 candidates in 61 s: 3 built, 12 already there, 1 dropped as wrong or broken, 1 left" in text
    assert f"  dropped linear_attention.chunk_bwd_kv float16 {dropped['config']}: {why}\n" in text
    assert text.endswith(f"table: {empty_cache / 'table.json'}\n")
    assert "build and check" in err and "time the survivors" in err
    ((plan, fresh),) = seen
    assert (plan.dims, plan.dtypes, plan.jobs, plan.checked, fresh) == (
        [(16, 16), (32, 64)], ["float32", "float16"], 3, True, True,
    )  # fmt: skip
    code, out, _ = say("tune", "--skip-verify", "--json")
    assert (code, json.loads(out)["rows"], json.loads(out)["seconds"]) == (0, ROWS, 61.4)
    assert seen[1][0].checked is False and seen[1][1] is False


# ---- build


def test_build_finds_what_is_there(say: Any, binaries: None):
    before = {e.key: e.path.stat().st_mtime_ns for e in loader.user_store().entries()}
    code, text, err = say("build", "--arch", NATIVE, "--dtypes", "float32")
    assert code == 0
    check_text(text)
    assert text == f"{len(KERNELS)} binaries in {os.environ['LINATTN_TL_CACHE_DIR']}\n"
    assert sorted(line.split()[1] for line in err.splitlines()) == KERNELS
    assert {e.key: e.path.stat().st_mtime_ns for e in loader.user_store().entries()} == before


def test_build_that_fails_names_what_failed(say: Any, monkeypatch: pytest.MonkeyPatch, empty_cache: Path):
    def run_tasks(tasks: Any, worker: str, *, on_result: Any, **_: Any) -> None:
        for i in range(len(tasks)):
            on_result(Outcome(i, "error", error="BuildError: no") if i == 1 else Outcome(i, "ok"))

    monkeypatch.setattr(tuning, "run_tasks", run_tasks)
    code, text, err = say("build", "--arch", "cpu-v3", "--dtypes", "bfloat16,float16")
    assert code == 1
    check_text(text)
    count = 2 * len(KERNELS)
    assert text.startswith(f"{count - 1} binaries in {empty_cache}\n")
    assert re.search(r"^  failed: \w+\.\w+ bfloat16 cpu-v3: BuildError: no$", text, re.M)
    assert re.fullmatch(rf"\[2/{count}\] \w+\.\w+ \w+ cpu-v3: error", err.splitlines()[1])
    code, out, _ = say("build", "--arch", "cpu-v3", "--dtypes", "bfloat16,float16", "--json")
    report = json.loads(out)
    assert (code, len(report["built"]), report["cache"]) == (1, count, str(empty_cache))
    assert [b["status"] for b in report["built"]].count("error") == 1


# ---- cache

SHAPE = ("--heads", "32", "--key-dim", "128", "--no-normalizer", "--kv-heads", "8", "--layers", "8")
KINDS = ("linear", "hybrid", "mha", "gqa", "mqa", "mla")


def test_cache(say: Any):
    """By hand: states of 2 MiB a layer; 16, 4, 0.5 and 1.125 KiB a token and layer; two of the hybrid's layers grow."""
    code, text, err = say("cache", *SHAPE, "--lengths", "65536,1024")
    assert (code, err) == (0, "")
    check_text(text, tables=1)
    head, titles, _, *rows = text.splitlines()[:9]
    assert head.startswith("8 layers, H=32 HV=32 K=128 V=128; 4 bytes") and head.endswith("MiB a sequence")
    assert titles.split()[2:] == ["T=1,024", "T=65,536", ">=", "linear", ">=", "hybrid"]
    assert [(row.split()[0], *row.split()[-4:]) for row in rows] == [
        ("linear", "16.0", "16.0", "-", "-"),
        ("hybrid", "20.0", "524.0", "512", "-"),
        ("MHA", "128.0", "8,192.0", "128", "103"),
        ("GQA", "32.0", "2,048.0", "512", "512"),
        ("MQA", "4.0", "256.0", "4,096", "-"),
        ("MLA", "9.0", "576.0", "1,821", "12,288"),
    ]


def test_cache_by_default_fits_a_screen(say: Any):
    code, text, _ = say("cache")
    assert code == 0
    check_text(text, tables=1)
    assert len(text.splitlines()) <= 24 and max(map(len, text.splitlines())) <= 120
    check_text(say("cache", "--pattern", "L" * 300 + "S", "--conv-size", "4", "--layers", "600")[1], tables=1)


def test_cache_of_a_small_model_counts_single_bytes(say: Any):
    text = say("cache", "--heads", "1", "--key-dim", "4", "--layers", "1", "--lengths", "1,3")[1]
    check_text(text, tables=1)
    assert "; bytes a sequence" in text
    assert text.splitlines()[3].split()[-4:] == ["80", "80", "-", "-"]  # 4 (16 + 4)


def test_cache_json(say: Any):
    options = ("--pattern", "DS", "--softmax", "mla", "--lengths", "10", "--state-bytes", "2", "--kv-bytes", "1")
    code, out, err = say("cache", *SHAPE, *options, "--json")
    report = json.loads(out)
    assert (code, err, report["lengths"], report["plot"]) == (0, "", [10], None)
    assert (report["model"]["pattern"], report["model"]["softmax"]) == ("DS", "mla")
    assert report["model"]["layer"] == {
        "H": 32, "HV": 32, "K": 128, "V": 128, "normalizer": False, "conv_size": 1, "kv_heads": 8,
        "latent": 512, "rope": 64,
    }  # fmt: skip
    kinds = report["kinds"]
    assert tuple(kinds) == KINDS
    state = 2 * 4 * 524288
    assert kinds["hybrid"] == {
        "fixed_bytes": state, "bytes_per_token": 4 * 576, "bytes": [state + 4 * 5760], "crossover": {"linear": 1821}
    }  # fmt: skip
    assert kinds["mqa"]["crossover"] == {"linear": 4096, "hybrid": None}
    assert (kinds["linear"]["bytes"], kinds["linear"]["crossover"]) == ([2 * state], {})


def test_cache_takes_every_size(say: Any):
    options = ("--value-heads", "64", "--value-dim", "16", "--conv-size", "4", "--latent", "100", "--rope", "0")
    kinds = json.loads(say("cache", *SHAPE, *options, "--json")[1])["kinds"]
    state = 64 * 128 * 16 + 3 * (2 * 32 * 128 + 64 * 16)
    assert kinds["linear"]["fixed_bytes"] == 4 * 8 * state
    tokens = {"mha": 32 * 128 + 64 * 16, "gqa": 8 * 144, "mqa": 144, "mla": 100}
    assert {kind: kinds[kind]["bytes_per_token"] for kind in tokens} == {k: 2 * 8 * n for k, n in tokens.items()}


def test_cache_plot(say: Any, tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "sizes.png"
    code, text, err = say("cache", "--plot", str(path))
    assert (code, err) == (0, "") and text.endswith(f"wrote {path}\n")
    assert path.read_bytes().startswith(b"\x89PNG")
    out = say("cache", "--plot", str(path), "--lengths", "1", "--pattern", "S", "--json")[1]
    assert json.loads(out)["plot"] == str(path)


def test_cache_plot_without_matplotlib_says_so(say: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = error(say("cache", "--plot", str(tmp_path / "sizes.png")), "cache")
    assert "--plot needs matplotlib" in message and "linattn-tl[plot]" in message
    assert say("cache")[0] == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--heads", "0"], "--heads is 0; expected at least 1"),
        (["--key-dim", "-4"], "--key-dim is -4; expected at least 1"),
        (["--value-dim", "0"], "--value-dim is 0; expected at least 1"),
        (["--value-heads", "33"], "--value-heads is 33; expected a multiple of H = 32"),
        (["--kv-heads", "5"], "--kv-heads is 5; expected a divisor of HV = 32"),
        (["--conv-size", "0"], "--conv-size is 0; expected at least 1"),
        (["--layers", "0"], "--layers is 0; expected at least 1"),
        (["--pattern", "L-S"], "--pattern is 'L-S'; expected capital letters"),
        (["--softmax", "full"], "--softmax is 'full'; expected one of mha, gqa, mqa, mla"),
        (["--kv-bytes", "0"], "--kv-bytes is 0; expected at least 1"),
        (["--lengths", "64,1k"], "--lengths has '1k'; expected tokens, at least 1"),
        (["--lengths", "0"], "--lengths has '0'; expected tokens, at least 1"),
        (["--lengths", ""], "--lengths has ''; expected tokens, at least 1"),
        (["--plot", "sizes.txt"], "--plot is 'sizes.txt'; expected a name that ends in .png"),
    ],
)
def test_cache_names_what_is_wrong(say: Any, argv: list[str], message: str):
    assert message in error(say("cache", *argv), "cache")


# ---- errors


@pytest.mark.parametrize("json_too", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["explain", "quadratic_attention"], ["'quadratic_attention'", *OPS]),
        (["show", "--arch", "cpu-v9"], ["'cpu-v9'", "cpu-v3", "cpu-v4"]),
        (["build", "--arch", "cpu-v3,cpu-v9"], ["'cpu-v9'", "cpu-v3", "cpu-v4"]),
        (["tune", "--arch", "cpu-v9"], ["'cpu-v9'", "native"]),
        (["tune", "--dtypes", "float32,float99"], ["'float99'", *DTYPES]),
        (["tune", "--ops", "quadratic_attention"], ["'quadratic_attention'", "linear_attention"]),
        (["tune", "--dims", "64,abc"], ["'abc'"]),
        (["tune", "--dims", "300"], ["300x300", "256"]),
        (["tune", "--dims", "0"], ["0x0"]),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, list) and v and v[0] in ("explain", "show", "build", "tune") else "",
)
def test_an_unknown_word_is_named(
    say: Any, argv: list[str], names: list[str], json_too: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tuning, "run", None)  # no word here may start a run
    monkeypatch.setattr(tuning, "run_tasks", None)
    message = error(say(*argv, *json_too), argv[0])
    assert all(name in message for name in names), message


@pytest.mark.parametrize(
    "argv", [["explain", "linear_attention", "--dtype"], ["build", "--arch", "cpu-v3", "--dtypes"]]
)
def test_an_unknown_dtype_is_named(say: Any, argv: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tuning, "run_tasks", lambda *a, **k: None)
    assert "'float99'" in error(say(*argv, "float99"), argv[0])


def test_without_a_compiler_tune_and_build_say_so(say: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "tools", lambda: build.Tools("g++ is not on PATH"))
    for command in ("tune", "build"):
        assert "g++ is not on PATH" in error(say(command), command)


def test_an_interrupted_run_says_what_is_kept(say: Any, monkeypatch: pytest.MonkeyPatch):
    def run(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "run", run)
    code, out, err = say("tune")
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "linattn-tl tune: interrupted; what was finished is kept"


def test_an_error_of_ours_is_not_swallowed(monkeypatch: pytest.MonkeyPatch):
    """A bug shows its traceback."""

    def run(*_: Any, **__: Any) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(tuning, "run", run)
    with pytest.raises(AssertionError, match="a bug"):
        cli.main(["tune"])


# ---- as a program


def test_as_a_program(binaries: None):
    command = [sys.executable, "-m", "linattn_tl"]
    done = subprocess.run(
        [*command, "explain", "linear_attention", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["backend"] == "binary"
    assert done.stderr == ""
    done = subprocess.run([*command, "explain", "other"], capture_output=True, text=True, check=False)
    assert error((done.returncode, done.stdout, done.stderr), "explain")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "usage: linattn-tl" in done.stderr


def test_help_imports_nothing_heavy():
    heavy = "{'torch', 'tilelang', 'tqdm'}"
    script = f"import sys; from linattn_tl import cli; cli.make_parser(); print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=build.ROOT)
    assert done.stdout == "set()\n"
