"""The benchmark: rivals compute what we compute, a wrong one stops the run, and the output can be read."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from autotune.verify import check_close
from benchmarks import cases, costs, delta, gated, report, rivals, rows, run
from benchmarks.cases import Case
from linattn_tl.cli import main as command
from linattn_tl.ops.linear_attention.definition import Options, TorchRunner, recurrent

SEQUENCE_RIVALS = ("eager chunked", "eager tuned", "eager loop", "SDPA")
DECODE_RIVALS = ("eager in place", "definition")
SMALL = {
    "forward": Case("forward", 1, 128, 16, H=2, rivals=SEQUENCE_RIVALS),
    "backward": Case("backward", 1, 128, 16, H=2, rivals=SEQUENCE_RIVALS),
    "decode": Case("decode", 1, 1, 16, B=2, H=2, rivals=DECODE_RIVALS),
}


def tokens(T: int = 128, D: int = 16) -> list[torch.Tensor]:
    return [torch.randn(1, T, 2, D) for _ in "qkv"]


def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    inputs = (q.double(), k.double(), v.double(), None, None)
    return TorchRunner(recurrent).forward(inputs, None, Options())[0][0]


@pytest.mark.parametrize("form", [rivals.chunk_textbook, rivals.chunk_parallel, rivals.chunk_loop])
@pytest.mark.parametrize("chunk", [64, 128])
def test_chunked_rivals_equal_the_definition(form, chunk):
    q, k, v = tokens(256)
    check_close("o", form(q, k, v, chunk), definition(q, k, v))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
def test_compiled_rival_equals_the_definition():
    q, k, v = tokens(64)
    check_close("o", rivals.compiled(rivals.chunk_parallel)(q, k, v, 32), definition(q, k, v))


@pytest.mark.parametrize("step", [rivals.step_addcmul, rivals.step_baddbmm, rivals.step_fused])
def test_step_rivals_equal_the_definition(step):
    q, k, v = tokens(8)
    kv, z = torch.zeros(1, 2, 16, 16), torch.zeros(1, 2, 16)
    rows = [torch.full((1, 2, 16), float("nan")) for _ in range(8)]
    for t, row in enumerate(rows):
        step(q[:, t], k[:, t], v[:, t], kv, z, row)
    check_close("o", torch.stack(rows, 1), definition(q, k, v))


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)
def test_every_contestant_of_a_case_is_right(case):
    prepared = cases.prepare(case)
    assert list(prepared.contestants) == [cases.OURS, *case.rivals]
    assert prepared.left_out == {}


def test_flops_are_those_of_the_formula():
    case = Case("forward", 1, T=10, D=4, B=2, H=3)
    assert case.flops == 60 * (4 * 16 + 33 * 8)
    assert Case("backward", 1, T=10, D=4, B=2, H=3).flops == 60 * (14 * 16 + 4 * 33 * 8)


def small_suite(monkeypatch):
    monkeypatch.setattr(cases, "suite", lambda groups, threads, quick: [SMALL[g] for g in groups if g in SMALL])
    monkeypatch.setattr(cases, "scaling_suite", lambda threads, quick: [replace(SMALL["forward"], group="scaling")])
    monkeypatch.setattr(report.measure, "bandwidth_gbps", lambda: 1.0)


@pytest.mark.parametrize(
    ("group", "name", "told"),
    [
        ("forward", "chunk_parallel", "eager tuned (parallel C=64) is wrong: o"),
        ("decode", "step_addcmul", "eager in place (addcmul_) is wrong: o"),
    ],
)
def test_a_wrong_contestant_stops_the_run(monkeypatch, capsys, group, name, told):
    small_suite(monkeypatch)
    right = getattr(rivals, name)
    monkeypatch.setattr(rivals, name, lambda *args: right(*args).mul_(1.001))
    monkeypatch.setattr(cases, "fastest", lambda variants: next(iter(variants.items())))
    assert run.main(["--only", group, "--threads", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err


def test_a_wrong_gradient_stops_the_run(monkeypatch, capsys):
    small_suite(monkeypatch)
    right = rivals.chunk_parallel
    monkeypatch.setattr(rivals, "chunk_parallel", lambda q, k, v, chunk: right(q, k, v.detach(), chunk) + 0 * v)
    assert run.main(["--only", "backward", "--threads", "1"]) == 1
    assert "is wrong: dv" in capsys.readouterr().err


def test_our_own_wrong_result_stops_the_run(monkeypatch, capsys):
    small_suite(monkeypatch)
    right = cases.linattn_tl.linear_attention

    def wrong(*args, **kwargs):
        o, state = right(*args, **kwargs)
        return (o if kwargs.get("backend") == "torch" else o + 1e-3), state

    monkeypatch.setattr(cases.linattn_tl, "linear_attention", wrong)
    assert run.main(["--only", "forward", "--threads", "1"]) == 1
    assert "ours" in capsys.readouterr().err


def test_json_and_tables_and_pictures(monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    small_suite(monkeypatch)
    file = tmp_path / "all.json"
    options = ["--quick", "--threads", "1", "--only", "forward,decode,overhead", "--plot", str(tmp_path)]
    assert run.main([*options, "--json", str(file)]) == 0
    text = capsys.readouterr().out
    for wanted in ("forward, float32", "one decode step", "eager chunked", "targets met", "scaling.png"):
        assert wanted in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("wrote")) <= 120
    assert {p.name for p in tmp_path.iterdir()} == {"all.json", "ratios.png", "scaling.png"}
    found = json.loads(file.read_text())
    assert [r["group"] for r in found["results"]] == ["forward", "decode", "scaling"]
    assert set(found["results"][0]["contestants"]) == {cases.OURS, *SEQUENCE_RIVALS}
    assert found["results"][0]["contestants"][cases.OURS]["ratio"] == 1
    assert set(found["overhead_us"]) == {"linear_attention", "linear_attention_decode"}


def test_json_on_stdout_is_nothing_but_json(monkeypatch, capsys):
    small_suite(monkeypatch)
    assert run.main(["--quick", "--only", "forward", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["T"] == 128


def timing(us: float) -> cases.measure.Timing:
    return cases.measure.Timing(us, us, 0.0, 1, 1, (us,))


@pytest.mark.parametrize(("rival_us", "met"), [(410.0, True), (390.0, False)])
def test_targets_compare_with_the_bound(rival_us, met):
    machine = report.Machine("cpu", "cpu-v3", 2, "2", "abc", 0.0, {1: 100.0}, 20.0)
    case = Case("forward", 1, 4096, 128)
    times = {cases.OURS: timing(100.0), "eager chunked": timing(rival_us)}
    measured = report.Run(machine, [cases.Result(case, times, {}, {})])
    [verdict] = report.verdicts(measured)
    assert (verdict.value, verdict.met) == (rival_us / 100, met)
    assert ("NOT MET" in report.targets_text(measured)) is not met


@pytest.mark.parametrize("args", [["--only", "nothing"], ["--threads", "0"], ["--threads", "a"]])
def test_bad_arguments_are_refused(args):
    with pytest.raises(SystemExit) as stopped:
        run.main(args)
    assert stopped.value.code == 2


def test_import_time_is_measured_in_another_process():
    assert 0 < costs.import_seconds(1) < 30


# ---- linattn-tl bench


def test_bench_times_every_backend_that_serves(capsys):
    sizes = ["--T", "64", "--H", "2", "--HV", "4", "--K", "16", "--V", "24", "--rounds", "2", "--threads", "1"]
    assert command(["bench", *sizes, "--backward", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    backends = [row["backend"] for row in found["rows"]]
    assert backends[-1] == "torch"
    assert set(backends) | set(found["not_timed"]) == {"binary", "jit", "cupy", "torch"}
    assert all(row["median_us"] > 0 for row in found["rows"])


def test_bench_decode_counts_bytes(capsys):
    assert command(["bench", "--op", "linear_attention_decode", "--K", "16", "--H", "2", "--rounds", "2"]) == 0
    out = capsys.readouterr().out
    assert "GB/s" in out
    assert "torch" in out


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--op", "linear_attention_decode", "--backward"], "no backward"),
        (["--H", "2", "--HV", "3"], "multiple of --H"),
        (["--dtype", "int8"], "--dtype is int8"),
        (["--T", "-1"], "--T is -1"),
        (["--op", "nothing"], "op is 'nothing'"),
    ],
)
def test_bench_refuses(args, told, capsys):
    assert command(["bench", *args]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("name", gated.CASES)
def test_every_contestant_of_a_gated_case_is_right(name, monkeypatch, capsys):
    """At sizes that take no time, and without the compiler, which has the same form to compile."""
    for size, value in {"T": 256, "H": 2, "D": 16, "STATE": 16, "HEAD": 8, "STEPS": 2}.items():
        monkeypatch.setattr(gated, size, value)
    monkeypatch.setattr(rivals, "compiled", lambda form: form)
    with torch.set_grad_enabled("backward" in name):
        assert {"ours", "eager"} <= gated.CASES[name]().keys()
    row = rows.measured(name, gated.CASES[name], 1)
    assert row.ours_ms > 0 and row.ratios["eager"] > 0
    assert f"{row.ratios['eager']:.2f}x" in rows.table([row])


@pytest.mark.parametrize("name", delta.CASES)
def test_every_contestant_of_a_delta_case_is_right(name, monkeypatch):
    for size, value in {"T": 256, "H": 2, "STEPS": 2, "HEADS": 2, "D_STEP": 16, "PROMPT": 70}.items():
        monkeypatch.setattr(delta, size, value)
    with torch.set_grad_enabled("backward" in name):
        assert list(delta.CASES[name]()) == ["ours", "transformers"]


def test_where_the_time_of_a_prompt_goes(monkeypatch):
    monkeypatch.setattr(delta, "PROMPT", 70)
    found = delta.where_it_goes(1)
    assert "aten::" in found and "outside of torch operators" in found
