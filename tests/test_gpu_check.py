"""benchmarks.gpu_check, without a GPU: what is right, wrong, lost or not run is reported as such.

What it does on a GPU runs here over stand-ins for torch.cuda, with CPU tensors and the CPU's binaries: they test the
checks, and that these see what they are for. Tests marked gpu are the checks themselves.
"""

import contextlib
import json
import re
import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from autotune import build, store
from benchmarks import gpu_cases, gpu_check, gpu_requirements, gpu_timing
from benchmarks.gpu_rows import Check, DeviceLost, Found, NotRun, Session, WrongResult, attempt, run_section
from linattn_tl.ops import delta_rule, simple_gla
from linattn_tl.ops.linear_attention.cpu import CpuDecode, CpuRunner
from tests import conformance
from tl_kernels.spec import Kernel

CPU = Session(torch.device("cpu"), quick=True)
LA, DECODE = "linear_attention", "linear_attention_decode"

pytestmark = pytest.mark.usefixtures("binaries")


def subject(op):
    return conformance.subjects()[op]


@pytest.fixture
def few_cases(monkeypatch):
    """Two sequences and two steps, in one dtype."""
    monkeypatch.setattr(gpu_cases, "DTYPES", ("float32",))
    for name in ("sequence_cases", "decode_cases"):
        every = getattr(gpu_cases, name)(CPU)
        monkeypatch.setattr(gpu_cases, name, lambda session, every=every: every[:2])
    monkeypatch.setattr(gpu_timing.measure, "bandwidth_gbps", lambda: 10.0)
    gpu_timing.copy_gbps.cache_clear()


def go(*args):
    return gpu_check.main(["--device", "cpu", "--quick", *args])


# ---- the whole script


@pytest.mark.usefixtures("few_cases")
def test_a_run_on_the_cpu(tmp_path, capsys):
    assert go("--json", str(tmp_path / "a.json"), "--save", str(tmp_path / "measured")) == 0
    out, err = capsys.readouterr()
    for wanted in ("section", "passed", "timing", "torch/ours", "decode", "of copy"):
        assert wanted in out
    assert "FAILED" not in out
    assert max(map(len, out.splitlines())) <= 2 * gpu_check.report.WIDTH
    assert re.search(r"\[ops (\d+)/\1\] ok: \w+_decode decode float32", err)

    found = json.loads((tmp_path / "a.json").read_text())
    assert json.loads((tmp_path / "measured" / "cpu.json").read_text())["rows"] == found["rows"]
    assert found["environment"]["torch"] == torch.__version__
    assert list(found["sections"]) == ["environment", "ops", "requirements", "timing"]
    assert found["sections"]["ops"] == {"passed": 3 * len(gpu_cases.subjects(CPU)), "failed": 0, "not_run": 0}
    assert {"section", "name", "ok", "detail", "seconds", "numbers"} == set(found["rows"][0])
    assert all(row["ok"] is True for row in found["rows"])
    forward, backward, decode = found["timings"]
    assert [t["what"] for t in (forward, backward, decode)] == ["forward", "backward", "decode"]
    assert forward["floor_bytes"] == 4 * 2 * 128 * 2 * 16 * 4
    assert decode["floor_bytes"] == 2 * 2 * 2 * 17 * 16 * 4 + 4 * 2 * 2 * 16 * 4
    assert forward["share_of_copy"] == pytest.approx(forward["gbps"] / 10.0)
    assert set(forward["times"]) == {"ours", "torch"} and forward["ratios"]["torch"] > 0


@pytest.mark.usefixtures("few_cases")
def test_a_wrong_result_is_a_failure(monkeypatch, capsys):
    right = CpuRunner.forward

    def wrong(*args, **kwargs):
        outputs, saved = right(*args, **kwargs)
        outputs[0].mul_(1.001)
        return outputs, saved

    monkeypatch.setattr(CpuRunner, "forward", wrong)
    assert go("--only", "ops") == 1
    out = capsys.readouterr().out
    assert "FAILED ops: linear_attention forward float32 16x24, whole chunks: VerificationError: o has relative" in out
    assert "FAILED ops: linear_attention_decode" not in out


@pytest.mark.usefixtures("few_cases")
def test_a_wrong_gradient_is_a_failure(monkeypatch, capsys):
    right = CpuRunner.backward
    monkeypatch.setattr(CpuRunner, "backward", lambda *args: [None if g is None else g * 1.001 for g in right(*args)])
    assert go("--only", "ops") == 1
    out = capsys.readouterr().out
    assert "linear_attention backward float32 16x24, ragged: VerificationError: dq" in out
    assert "linear_attention forward" not in out


@pytest.mark.usefixtures("few_cases")
def test_an_exception_in_one_case_stops_no_other(monkeypatch, capsys, tmp_path):
    right = gpu_cases.call

    def broken(subject, case, *rest):
        if case.id == "ragged":
            raise IndexError("of this case\nand more of it")
        return right(subject, case, *rest)

    monkeypatch.setattr(gpu_cases, "call", broken)
    assert go("--only", "ops,timing", "--json", str(tmp_path / "a.json")) == 1
    assert "16x24, ragged: IndexError: of this case\n" in capsys.readouterr().out
    found = json.loads((tmp_path / "a.json").read_text())
    ops = len(gpu_cases.subjects(CPU))
    assert found["sections"] == {
        "ops": {"passed": 2 * ops, "failed": ops, "not_run": 0},
        "timing": {"passed": 4, "failed": 0, "not_run": 0},
    }


def test_a_section_that_cannot_be_listed_stops_no_other(monkeypatch, capsys):
    monkeypatch.setitem(gpu_check.SECTIONS, "ops", lambda session: 1 / 0)
    assert go("--only", "environment,ops") == 1
    out = capsys.readouterr().out
    assert "FAILED ops: listing the checks: ZeroDivisionError" in out
    assert "environment       2       0        0" in out


def test_without_a_gpu_it_says_so_and_exits_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and "--device cpu" in err


@pytest.mark.parametrize("args", [["--only", "nothing"], ["--device", "meta"]])
def test_bad_arguments_are_refused(args):
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main(args)
    assert stopped.value.code == 2


def test_ours_must_be_right_before_it_is_timed(monkeypatch):
    monkeypatch.setattr(gpu_timing, "linear_attention", lambda q, k, v, backend: (v, None))
    row = attempt("timing", Check("forward", partial(gpu_timing.time_case, gpu_timing.cases(CPU)[0], CPU)))
    assert row.ok is False and "VerificationError: o" in row.detail


def test_a_wrong_rival_is_left_out(monkeypatch):
    right = gpu_timing.linear_attention
    wrong = lambda q, k, v, backend: right(q, k, v, backend=backend) if backend == "binary" else (v, None)  # noqa: E731
    monkeypatch.setattr(gpu_timing, "linear_attention", wrong)
    monkeypatch.setattr(gpu_timing, "copy_gbps", lambda session: 10.0)
    found = gpu_timing.time_case(gpu_timing.cases(CPU)[0], CPU).numbers
    assert list(found["times"]) == ["ours"] and "VerificationError" in found["left_out"]["torch"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"), ("RTX 4090/D", "rtx-4090-d"), ("", "unknown")],
)
def test_a_file_is_named_after_the_device(name, wanted):
    assert gpu_check.slug(name) == wanted


# ---- rows, and processes that are lost


def no(error):
    raise error


def checks(session):
    return [
        Check("right", lambda: Found("fine", {"a": 1})),
        Check("not here", lambda: no(NotRun("no memory"))),
        Check("wrong", lambda: no(WrongResult("bad"))),
        Check("silent", lambda: no(KeyError())),
        Check("last", Found),
    ]


def test_outcomes_of_checks():
    rows = []
    run_section("s", checks, CPU, lambda row, total: rows.append((row.name, row.ok, row.detail, total)))
    assert rows == [
        ("right", True, "fine", 5),
        ("not here", None, "no memory", 5),
        ("wrong", False, "WrongResult: bad", 5),
        ("silent", False, "KeyError", 5),
        ("last", True, "", 5),
    ]


def test_checks_past_the_deadline_are_not_run_and_say_so():
    rows = []
    run_section("s", checks, CPU, lambda row, total: rows.append(row), first=3, deadline=time.monotonic() - 1)
    assert [(row.name, row.ok) for row in rows] == [("silent", None), ("last", None)]
    assert "time was used up" in rows[0].detail


def test_a_failure_that_broke_the_device_ends_the_process(monkeypatch):
    rows = []
    monkeypatch.setattr(Session, "cuda", True)
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: no(RuntimeError("CUDA error: an illegal access")))
    with pytest.raises(DeviceLost, match="illegal access"):
        run_section("s", checks, CPU, lambda row, total: rows.append(row.name))
    assert rows == ["right", "not here", "wrong"]


CHILD = """
import json, os, sys, time
from pathlib import Path
file, first, how = Path(sys.argv[1]).open("w"), int(sys.argv[2]), sys.argv[3:]
def say(**said):
    file.write(json.dumps(said) + "\\n")
    file.flush()
for name, end in list(zip("abcd", how))[first:]:
    if end == "early":
        os._exit(1)
    say(begun=name)
    if end == "crash":
        os.abort()
    if end == "hang":
        time.sleep(60)
    say(row={"section": "s", "name": name, "ok": end == "ok"}, total=4)
    if end == "lost":
        os._exit(3)
"""


@pytest.mark.parametrize(
    ("ends", "wanted"),
    [
        (("ok", "wrong", "ok", "ok"), "ok wrong ok ok"),
        (("ok", "crash", "ok", "ok"), "ok wrong ok ok"),
        (("lost", "ok", "hang", "ok"), "wrong ok wrong ok"),
        (("ok", "early", "ok", "ok"), "ok wrong"),
        (("crash", "crash", "crash", "crash"), "wrong wrong wrong wrong"),
    ],
)
def test_a_process_goes_on_behind_the_check_that_was_lost(monkeypatch, ends, wanted):
    monkeypatch.setattr(gpu_check, "HANG_S", 1.5)
    monkeypatch.setattr(
        gpu_check,
        "child_command",
        lambda section, session, limit_s, file, first: [sys.executable, "-c", CHILD, str(file), str(first), *ends],
    )
    rows = gpu_check.isolated("s", CPU, 60.0, gpu_check.Progress())
    assert " ".join("ok" if row.ok else "wrong" for row in rows) == wanted
    said = " ".join(row.detail for row in rows)
    assert ("signal 6" in said) == ("crash" in ends)
    assert ("nothing for" in said) == ("hang" in ends)
    assert ("given up: exit status 1" in said) == ("early" in ends)


def test_a_section_in_a_process_of_its_own():
    rows = gpu_check.isolated("environment", CPU, 60.0, gpu_check.Progress())
    assert [(row.name, row.ok) for row in rows] == [("device", True), ("binaries", True)]


# ---- the section of kernels, over a store of stand-ins


class Trial:
    """Stands in for a family's trial: knows one config as wrong."""

    def __init__(self):
        self.tried = []

    def check(self, kernel, problem, launcher, device):
        self.tried.append((kernel.name, problem.K, launcher.config.size, str(device)))
        if launcher.config.size == 2:
            raise RuntimeError("this config is wrong")


class Config:
    __dataclass_fields__ = {}  # noqa: RUF012

    def __init__(self, size):
        self.size = size


@pytest.fixture
def kernel_store(monkeypatch):
    """A store with three configs of a kernel, one of them built from other sources, and one of another arch."""
    configs = {size: Config(size) for size in (1, 2, 3)}
    kernel = Kernel("toy.forward", lambda *args: None, lambda *args: list(configs.values()))
    monkeypatch.setattr(Kernel, "find_config", lambda self, problem, device, wanted: configs[wanted["size"]])
    trial = Trial()
    compiled = SimpleNamespace(kernels=(kernel,), trial=trial)
    op = SimpleNamespace(name="toy", compiled={"cuda": compiled})
    cpu_only = SimpleNamespace(name="other", compiled={})
    monkeypatch.setattr(gpu_cases.registry, "all_ops", lambda: {"toy": op, "other": cpu_only})
    monkeypatch.setattr(build, "binary_key", lambda k, p, config, arch, checked: f"key {config.size} {checked}")
    monkeypatch.setattr(gpu_cases, "CudaBinary", lambda path: path)
    monkeypatch.setattr(gpu_cases, "CudaLauncher", lambda binary, config: SimpleNamespace(config=config))
    monkeypatch.setattr(gpu_cases, "runnable_archs", lambda device: ("sm_90a",))

    def entry(key, size, arch="sm_90a", smem=1000):
        functions = {"f": {"smem_bytes": smem, "static_smem_bytes": 24}}
        manifest = {"kernel": "toy.forward", "dtype": "bfloat16", "static": {"K": 64, "V": 64}, "arch": arch}
        return store.Entry(key, None, {**manifest, "config": {"size": size}, "functions": functions})

    found = [entry("key 1 True", 1), entry("key 2 False", 2), entry("old", 3), entry("key 1 True b", 1, "sm_80")]
    monkeypatch.setattr(gpu_cases.loader, "stores", lambda: [SimpleNamespace(entries=lambda: found)])
    gpu_cases.entries.cache_clear()
    yield SimpleNamespace(trial=trial, found=found, entry=entry)
    gpu_cases.entries.cache_clear()


def test_every_stored_config_is_tried(kernel_store):
    rows = []
    run_section("kernels", gpu_cases.kernel_checks, CPU, lambda row, total: rows.append(row))
    assert kernel_store.trial.tried == [("toy.forward", 64, 1, "cpu"), ("toy.forward", 64, 2, "cpu")]
    assert [(row.name, row.ok) for row in rows] == [
        (f"toy.forward bfloat16 64x64 sm_90a size={size}", ok) for size, ok in ((1, True), (2, False), (3, None))
    ]
    assert "this config is wrong" in rows[1].detail and "other sources" in rows[2].detail


def test_a_store_without_a_binary_for_the_device_is_a_failure(kernel_store):
    kernel_store.found.clear()
    (check,) = gpu_cases.kernel_checks(CPU)
    assert attempt("kernels", check).ok is False
    with pytest.raises(WrongResult, match="sm_90a"):
        gpu_check.stored_binaries(CPU)


def test_head_dims_are_those_that_are_stored(kernel_store, monkeypatch):
    monkeypatch.setattr(Session, "cuda", True)
    assert list(gpu_cases.dims_to_try(CPU, "toy_decode", "bfloat16")) == [(64, 64)]
    assert list(gpu_cases.dims_to_try(CPU, "toy", "float32")) == [(64, 64)]  # refused, which is a failure
    kernel_store.found[0].manifest["static"] = {"K": 16, "V": 32}
    assert gpu_cases.stored_dims(kernel_store.found, "toy", "bfloat16") == [(64, 64), (16, 32)]


def test_R10_shared_memory(kernel_store, monkeypatch):
    device = SimpleNamespace(shared_memory_per_block_optin=232448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: device_of[0])
    device_of = [device]
    assert "3 binaries, at most 1024 of 232448" in gpu_requirements.shared_memory_fits(CPU).detail
    kernel_store.found.append(kernel_store.entry("large", 1, smem=232448))
    gpu_cases.entries.cache_clear()
    for device_of[0] in (device, SimpleNamespace()):  # an older torch does not tell
        with pytest.raises(WrongResult, match="1 binaries need more than the device's 232448 bytes"):
            gpu_requirements.shared_memory_fits(CPU)


# ---- requirements, over stand-ins for torch.cuda


class Graph:
    """Runs the step when it is captured, as Python does, and again at each replay."""

    def __init__(self, step):
        self.replay = step
        step()


class Event:
    def __init__(self, enable_timing):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


@pytest.fixture
def cuda_stand_ins(monkeypatch):
    """CPU tensors go through the checks of a GPU."""
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    modes = ["default"]
    for name, value in {
        "Stream": lambda device: stream,
        "current_stream": lambda device: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "_sleep": lambda cycles: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (10**12, 10**12),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda device: (9, 0),
        "get_sync_debug_mode": lambda: modes[-1],
        "set_sync_debug_mode": modes.append,
        "Event": Event,
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=2**10),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(gpu_requirements, "_captured", Graph)
    return SimpleNamespace(modes=modes)


@pytest.mark.usefixtures("cuda_stand_ins")
@pytest.mark.parametrize("op", [LA, DECODE])
def test_R13_a_kernel_that_did_not_wait_is_found(op, monkeypatch):
    check = partial(gpu_requirements.behind_busy_stream, subject(op), "binary", CPU)
    assert check().detail == "2/2 right"
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: self)  # the op sees what was there before
    with pytest.raises(WrongResult, match="repeat 1 of 2"):
        check()


@pytest.mark.usefixtures("cuda_stand_ins")
def test_R13_without_cupy_is_not_run():
    rows = [attempt("requirements", check) for check in gpu_requirements.side_stream(CPU)]
    ops = len(gpu_cases.subjects(CPU))
    assert [row.ok for row in rows] in ([True, None] * ops, [True, True] * ops)


@pytest.mark.usefixtures("cuda_stand_ins")
def test_R14_decode_replayed(monkeypatch):
    check = partial(gpu_requirements.captured_decode, subject(DECODE), CPU)
    assert check().detail == "3 replays"
    right = CpuDecode.__call__

    def leaves_padding(self, q, k, v, kv, z, slots, opt, out):
        right(self, q, k, v, kv, z, slots, opt, out)
        out[slots < 0] = 1.0

    def touches_another_row(self, q, k, v, kv, z, slots, opt, out):
        right(self, q, k, v, kv, z, slots, opt, out)
        kv[8] += 1.0  # which no slot of the first replay names

    def wrong(self, q, k, v, kv, z, slots, opt, out):
        right(self, q, k, v, kv, z, slots, opt, out).mul_(1.1)

    for broken, said in (
        (leaves_padding, "padded row"),
        (touches_another_row, "no slot names"),
        (wrong, "o has relat"),
    ):
        monkeypatch.setattr(CpuDecode, "__call__", broken)
        with pytest.raises(RuntimeError, match=said):
            check()


@pytest.mark.usefixtures("cuda_stand_ins")
def test_R14_forward_replayed(monkeypatch):
    check = partial(gpu_requirements.captured_forward, subject(LA), CPU)
    assert "2 replays" in check().detail
    monkeypatch.setattr(gpu_requirements, "_captured", lambda step: SimpleNamespace(replay=lambda: None, done=step()))
    with pytest.raises(WrongResult, match="replayed o has other bits"):
        check()


@pytest.mark.usefixtures("cuda_stand_ins")
@pytest.mark.parametrize("op", [LA, DECODE])
def test_R14_what_a_cold_process_runs(op, monkeypatch, capsys):
    graph = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(sys, "argv", ["-c", op, "16", "24", "cpu", "binary"])
    exec(gpu_requirements.COLD, {})
    found = json.loads(capsys.readouterr().out)
    assert gpu_requirements.judge_cold(op, found).detail == "captured, and right"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"said": None, "replayed": 0.5}, "replayed, o is wrong by 5.0e-01"),
        ({"said": "RuntimeError: linear_attention: preload", "afterwards": float("nan")}, "afterwards, o is wrong"),
        ({"said": "RuntimeError: CUDA error: operation not permitted"}, "does not name the op"),
    ],
)
def test_R14_a_cold_capture_is_right_or_refused_in_words(found, said):
    good = {"said": None, "replayed": None, "afterwards": 1e-3}
    with pytest.raises(WrongResult, match=said):
        gpu_requirements.judge_cold(LA, {**good, **found})
    refused = {**good, "said": "UnsupportedError: linear_attention: the first call"}
    assert "refused" in gpu_requirements.judge_cold(LA, refused).detail


def test_R14_a_crash_of_the_cold_process_is_told(monkeypatch):
    monkeypatch.setattr(gpu_requirements, "COLD", "import os, sys; sys.stderr.write('last words\\n'); os._exit(7)")
    with pytest.raises(WrongResult, match="ended with 7 and said: last words"):
        gpu_requirements.captured_cold(LA, CPU)


def test_R18_other_bits_are_found(monkeypatch):
    right, calls = CpuRunner.forward, []

    def wavers(self, *args, **kwargs):
        outputs, saved = right(self, *args, **kwargs)
        calls.append(1)
        if len(calls) == 2:
            outputs[0].view(-1)[7] += 1.0
        return outputs, saved

    monkeypatch.setattr(CpuRunner, "forward", wavers)
    with pytest.raises(WrongResult, match="o of repeat 2 has other bits in 1 of"):
        gpu_requirements.repeats(subject(LA), "float32", CPU)


@pytest.mark.usefixtures("cuda_stand_ins")
def test_R07_a_wrapped_offset_is_found(monkeypatch):
    """At a small size, where the same blocks of tokens are looked at."""
    for name, value in {"TOKENS": 1024, "HEADS": 2, "WIDTH": 32, "BLOCK": 32}.items():
        monkeypatch.setattr(gpu_requirements, name, value)
    found = gpu_requirements.large_tensors(CPU)
    assert set(found.numbers["relative_rms"]) == {"o", "dq", "dk", "dv"}
    right = gpu_requirements.linear_attention

    def wraps(q, k, v, **keywords):
        """The last block is read from the first sequence."""
        mixed = [x.clone() for x in (q, k, v)]
        for x in mixed:
            x[1, -32:] = x[0, :32]
        return right(*mixed, **keywords)

    monkeypatch.setattr(gpu_requirements, "linear_attention", wraps)
    with pytest.raises(RuntimeError, match="o has relative RMS"):
        gpu_requirements.large_tensors(CPU)


@pytest.mark.usefixtures("cuda_stand_ins")
def test_R07_without_memory_is_not_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    with pytest.raises(NotRun, match="1 GB are free"):
        gpu_requirements._need_bytes(torch.device("cuda"), 2**32)


def test_R09_a_wrong_pair_is_found_and_a_refused_one_is_not(monkeypatch):
    check = partial(gpu_requirements.one_head_dim, subject(LA), 16, (16, 257), CPU)
    found = check()
    assert found.numbers == {"right": [16], "refused": [257]} and "256" in found.detail
    right = CpuRunner.forward
    monkeypatch.setattr(CpuRunner, "forward", lambda *args, **kwargs: right(*args, **kwargs)[0][0].zero_())
    assert attempt("requirements", Check("R09", check)).ok is False


@pytest.mark.usefixtures("cuda_stand_ins")
def test_devices(monkeypatch):
    for op in (LA, DECODE):
        assert "0 current; 1 GPU" in gpu_requirements.own_device(subject(op), CPU).detail
    devices = iter([0, 1, 1, 1, 1])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: next(devices))
    with pytest.raises(WrongResult, match="current device was 0 and is 1"):
        gpu_requirements.own_device(subject(LA), CPU)
    assert "k is on cpu" in gpu_requirements.mixed_devices(Session(torch.device("meta"))).detail


def test_no_sync(cuda_stand_ins, monkeypatch):
    seen = []
    gated = [runner for family in (simple_gla, delta_rule) for runner in (family.CpuRunner, family.CpuDecode)]
    for op in (CpuRunner, CpuDecode, *gated):
        name = "forward" if hasattr(op, "forward") else "__call__"
        right = getattr(op, name)
        monkeypatch.setattr(
            op, name, lambda *a, right=right, **k: (seen.append(cuda_stand_ins.modes[-1]), right(*a, **k))[1]
        )
    for check in gpu_requirements.without_sync(CPU):
        seen.clear()
        check.run()
        assert seen[-1] == "error" and "error" not in seen[:-1], check.name
        assert cuda_stand_ins.modes[-1] == "default"


def test_timing_with_events(cuda_stand_ins, monkeypatch):
    monkeypatch.setattr(Session, "cuda", True)
    monkeypatch.setattr(gpu_timing, "FLUSH_BYTES", 2**10)
    gpu_timing._flush_buffer.cache_clear()
    order = []

    def work(name, seconds):
        order.append(name)
        time.sleep(seconds)

    runs = {"a": partial(work, "a", 2e-3), "b": partial(work, "b", 4e-3)}
    found = gpu_timing.time_in_turns(runs, CPU)
    gpu_timing._flush_buffer.cache_clear()
    assert found["b"].median_us > found["a"].median_us >= 2000
    assert found["a"].rounds == gpu_timing.QUICK_ROUNDS
    timed = order[2 * gpu_timing.WARMUP :]
    assert timed[:4] == ["a", "b", "b", "a"], "in turns, and not always the same one first"


# ---- the requirements themselves: what the script runs


@pytest.mark.gpu
@pytest.mark.parametrize("requirement", ["R07", "R13", "R14", "R18"])
def test_on_a_device(requirement):
    made = 0
    for check in gpu_requirements.GROUPS[requirement](Session(torch.device("cuda", 0))):
        with contextlib.suppress(NotRun):
            check.run()
            made += 1
    assert made, f"nothing of {requirement} could be run here"


@pytest.mark.parametrize("requirement", gpu_requirements.WITHOUT_GPU)
def test_on_the_cpu(requirement):
    session = replace(CPU, quick=requirement != "R07")
    for check in gpu_requirements.GROUPS[requirement](session):
        check.run()
