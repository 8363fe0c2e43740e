"""The CPU launcher: threads, groups of heads, segments of time, and the glue that binds a kernel to it."""

import dataclasses
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autotune import build, target
from autotune.launcher import cpu as launcher
from autotune.verify import check_close
from linattn_tl import loader, registry, walks
from linattn_tl.ops.linear_attention import cpu, trial
from linattn_tl.ops.linear_attention.definition import Options
from tl_kernels.linear_attention import cpu as kernels
from tl_kernels.spec import Arg, Problem

FINAL = Options(output_final_state=True)
HEADER = ("N", "T", "H", "HEADS", "K", "V", "SEGMENTS", "SEGMENT_STATES", "THREADS")  # as in cpu.h


class Spy:
    """A binary that remembers how it was asked to walk."""

    def __init__(self, binary: launcher.CpuBinary):
        self.binary, self.fixed, self.kept = binary, binary.fixed, binary.kept
        self.headers: list[dict[str, int]] = []
        self._start = 0

    def addresses(self, *words: int) -> bytes:
        addresses = self.binary.addresses(*words)
        self._start = len(addresses)
        return addresses

    def __call__(self, block: bytes) -> None:
        self.headers.append(dict(zip(HEADER, struct.unpack_from(f"={len(HEADER)}q", block, self._start), strict=True)))
        self.binary(block)

    def segments(self) -> list[int]:
        return [header["SEGMENTS"] for header in self.headers]


def load(dtype: str) -> dict[str, launcher.CpuBinary]:
    op, problem = registry.get_op("linear_attention"), Problem("linear_attention", dtype, 64, 64)
    return loader.load_launchers(op.compiled["cpu"], problem)[1]


@pytest.fixture
def runner(binaries: None) -> cpu.CpuRunner:
    return spied("float32")


def spied(dtype: str) -> cpu.CpuRunner:
    return cpu.CpuRunner({name: Spy(binary) for name, binary in load(dtype).items()})  # type: ignore[misc]


def example(case: trial.Case, K: int, V: int, dtype: str = "float32") -> tuple[list[Any], Any]:
    return trial.example(case, Problem("linear_attention", dtype, K, V))


def run(runner: cpu.CpuRunner, inputs: Sequence[Any], lengths: Any, opt: Options) -> dict[str, torch.Tensor]:
    """Outputs and all gradients, with upstream gradients made from the outputs."""
    outputs, saved = runner.forward(inputs, lengths, opt)
    upstream = [None if x is None else torch.cos(x.float()).to(x.dtype) for x in outputs]
    needs = [x is not None for x in inputs]
    grads = runner.backward(inputs, outputs, saved, lengths, upstream, needs, opt)
    named = zip(("o", "kv", "z", "dq", "dk", "dv", "dkv", "dz"), (*outputs, *grads), strict=True)
    return {name: x for name, x in named if x is not None}


# ---- threads and groups


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("H", [3, 9])
def test_results_do_not_depend_on_the_number_of_threads(
    binaries: None, nan_filled: None, dtype: str, causal: bool, H: int
):
    """Bit by bit, where there are as many heads as threads."""
    runner = spied(dtype)
    inputs, lengths = example(trial.Case(T=600, H=H, state=True), 64, 64, dtype)
    opt = FINAL._replace(causal=causal)
    found = {}
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found[threads] = run(runner, inputs, lengths, opt)
        assert {header["THREADS"] for header in runner.fwd.headers} == {threads}
        runner.fwd.headers.clear()
    assert sorted(found[1]) == ["dk", "dkv", "dq", "dv", "dz", "kv", "o", "z"]
    for name, x in found[1].items():
        assert torch.isfinite(x).all()
        assert torch.equal(x, found[2][name]), name
        assert torch.equal(x, found[3][name]), name


def one_head(inputs: Sequence[Any], h: int, heads: int) -> list[Any]:
    """The same tensors, narrowed to a q/k head and its value heads."""
    q, k, v, kv, z = inputs
    value = slice(h * heads, (h + 1) * heads)
    return [q[:, :, h : h + 1], k[:, :, h : h + 1], v[:, :, value], kv[:, value], z[:, h : h + 1]]


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("H", [1, 2, 3, 4, 5, 7, 8, 9])
def test_heads_walked_together_are_as_heads_alone(runner: cpu.CpuRunner, nan_filled: None, H: int, heads: int):
    """One, two, three and four at a time, and what is left over: N H / 2 on one thread, at most four."""
    torch.set_num_threads(1)
    inputs, _ = example(trial.Case(B=2, T=70, H=H, heads=heads, state=True), 40, 72)
    together = run(runner, inputs, None, FINAL)
    alone = [run(runner, one_head(inputs, h, heads), None, FINAL) for h in range(H)]
    for name, x in together.items():
        dim = 1 if name in ("kv", "z", "dkv", "dz") else 2
        assert torch.equal(x, torch.cat([a[name] for a in alone], dim)), name


# ---- segments


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("T", [1056, 1100])
def test_segments_of_one_sequence(runner: cpu.CpuRunner, nan_filled: None, causal: bool, state: bool, T: int):
    """One head and three threads: time is cut in three."""
    torch.set_num_threads(3)
    inputs, lengths = example(trial.Case(T=T, H=1, state=state), 40, 72)
    compare_with_truth(runner, inputs, lengths, FINAL._replace(causal=causal))
    assert runner.fwd.segments() == ([3, 3, 3] if causal else [3, 3])  # a causal backward sums the states again
    assert runner.bwd_q.segments() == [3]
    assert runner.bwd_kv.segments() == [3, 3]


def test_segments_of_packed_sequences(runner: cpu.CpuRunner, nan_filled: None):
    """A short sequence leaves its second segment without a chunk, and an empty one both."""
    torch.set_num_threads(6)
    lengths = (0, 20, 20, 1600)
    inputs, cu = example(trial.Case(T=lengths[-1], H=1, heads=2, state=True, lengths=lengths), 40, 72)
    compare_with_truth(runner, inputs, cu, FINAL)
    assert runner.fwd.segments() == [2, 2, 2]
    assert runner.bwd_kv.segments() == [2, 2]


def test_segments_of_kernels_with_other_chunks(runner: cpu.CpuRunner, nan_filled: None):
    """The forward kernel makes the states that the one of dq starts from, and a tuner may give them unlike chunks."""
    problem, device = Problem("linear_attention", "float32", 64, 64), target.offered()[0]
    chunk = runner.fwd.binary.config.C
    config = next(c for c in kernels.BWD_Q.configs(problem, device) if chunk != c.C)
    verify = trial.check
    entry = loader.build_and_store(kernels.BWD_Q, problem, device, verify, config)
    runner.bwd_q = Spy(launcher.CpuBinary(entry.path, kernels.BWD_Q, config))
    torch.set_num_threads(3)
    inputs, _ = example(trial.Case(T=1056, H=1), 64, 64)
    compare_with_truth(runner, inputs, None, FINAL)
    assert runner.bwd_q.segments() == [3]


@pytest.mark.parametrize(("every", "chunk", "reverse"), [(0, 32, False), (48, 32, False), (64, 32, True)])
def test_states_are_kept_where_chunks_begin(every: int, chunk: int, reverse: bool):
    args = (*kernels.FWD.args, Arg("states", "chunk", every=every))
    kernel = dataclasses.replace(kernels.FWD, args=args, reverse=reverse)
    with pytest.raises(ValueError, match=rf"states kept every \[{every}\] tokens with chunks of {chunk}"):
        launcher.glue(kernel, PROBLEM, dataclasses.replace(CONFIG, C=chunk), SOURCE)


def test_a_short_sequence_is_not_cut(runner: cpu.CpuRunner):
    torch.set_num_threads(3)
    inputs, _ = example(trial.Case(T=2 * walks.SEGMENT_TOKENS - 1, H=1), 128, 128)
    runner.forward(inputs, None, FINAL)
    assert runner.fwd.segments() == [1]


def compare_with_truth(runner: cpu.CpuRunner, inputs: Sequence[Any], lengths: Any, opt: Options) -> None:
    exact = trial.truth(list(inputs), lengths, opt)
    outputs, saved = runner.forward(inputs, lengths, opt)
    needs = [x is not None for x in inputs]
    grads = runner.backward(inputs, outputs, saved, lengths, exact.upstream, needs, opt)
    for name, x, want in zip(("o", "kv", "z"), outputs, exact.outputs, strict=True):
        check_close(name, x, want)
    for name, x, want in zip(("dq", "dk", "dv", "dkv", "dz"), grads, exact.grads, strict=True):
        if want is not None:
            check_close(name, x, want)


def test_the_header_is_as_the_launcher_reads_it():
    """HEADER above is read here from cpu.h, so that the tests look at the right words."""
    names = re.search(r"enum Header \{ (.*), HEADER \};", launcher.HEADER.read_text())
    assert names and tuple(names[1].split(", ")) == HEADER


# ---- memory


@pytest.mark.parametrize("threads", [1, 2])
def test_no_memory_for_the_states_is_an_error(binaries: None, threads: int):
    """2^40 value heads to a q/k head: more bytes than there are addresses."""
    binary = load("float32")[kernels.FWD.name]
    addresses = binary.addresses(*[0] * 11)
    fixed = binary.fixed(1, 1, 4, 1 << 40, 256, 256, 1, 0, threads, 1, 1, 1, 0, 1, 1.0, 1e-6, *[0] * 15)
    with pytest.raises(MemoryError, match=r"linear_attention\.chunk_fwd: no memory"):
        binary(addresses + fixed)


# ---- without torch


def launched_alone(tmp_path: Path, x: dict[str, np.ndarray], library: str) -> tuple[int, dict[str, np.ndarray]]:
    binary = load("float32")[kernels.FWD.name]
    np.savez(tmp_path / "in.npz", **x)
    script = Path(__file__).with_name("launch_alone.py")
    config = json.dumps(vars(binary.config))
    command = [sys.executable, str(script), str(binary.path), config, str(tmp_path / "in.npz")]
    environment = {**os.environ, "PYTHONPATH": str(build.ROOT), "OPENBLAS_NUM_THREADS": "1"}
    out = tmp_path / "out.npz"
    done = subprocess.run(
        [*command, str(out), *([library] if library else [])],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, "")
    with np.load(out) as found:
        return int(done.stdout), dict(found)


def test_without_openmp_a_launch_is_serial(binaries: None, tmp_path: Path):
    """And the same, bit by bit, as on torch's threads, and as on those of any other libgomp."""
    inputs, _ = example(trial.Case(T=300, H=6), 64, 64)
    x = {name: t.numpy() for name, t in zip("qkv", inputs[:3], strict=True)}
    started, serial = launched_alone(tmp_path, x, "")
    assert started == 0
    torch.set_num_threads(3)
    (o, kv, z), (den, *_) = spied("float32").forward(inputs, None, FINAL)
    for name, found in {"o": o, "kv": kv, "z": z, "den": den}.items():
        np.testing.assert_array_equal(serial[name], found.numpy(), err_msg=name)


def test_with_openmp_a_launch_is_parallel(binaries: None, tmp_path: Path):
    inputs, _ = example(trial.Case(T=300, H=6), 64, 64)
    x = {name: t.numpy() for name, t in zip("qkv", inputs[:3], strict=True)}
    started, parallel = launched_alone(tmp_path, x, "libgomp.so.1")
    assert started == 2
    _, serial = launched_alone(tmp_path, x, "")
    for name, found in serial.items():
        np.testing.assert_array_equal(parallel[name], found, err_msg=name)


# ---- glue


SOURCE = """
extern "C"
int32_t chunk_fwd_kernel_kernel(float* q, float* kv, int64_t q_row, int64_t v_head, int32_t rows, float scale);
int32_t chunk_fwd_kernel_kernel(float* q, float* kv, int64_t q_row, int64_t v_head, int32_t rows, float scale) {
  return 0;
}
"""
CONFIG = kernels.Config(32, 4, 32)
PROBLEM = Problem("linear_attention", "float32", 64, 64)


def test_a_signature_is_read_from_the_source():
    assert launcher.parse_signature(SOURCE, "chunk_fwd_kernel_kernel") == [
        ("float*", "q"),
        ("float*", "kv"),
        ("int64_t", "q_row"),
        ("int64_t", "v_head"),
        ("int32_t", "rows"),
        ("float", "scale"),
    ]


def test_a_function_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="no function 'other_kernel'"):
        launcher.parse_signature(SOURCE, "other_kernel")


def test_parameters_are_filled_in_the_order_of_the_emitted_function():
    """TileLang leaves out what a kernel does not use, so the order is not that of the prim_func."""
    glue = launcher.glue(kernels.FWD, PROBLEM, CONFIG, SOURCE)
    filled = (
        "(float*)s.data[0], (float*)s.data[5], s.row[0], s.head[2], s.rows, (float)linattn::as_double(s.scalars[5])"
    )
    assert f"chunk_fwd_kernel_kernel({filled});" in glue
    assert "CHUNK = 32, BLOCK = 32" in glue
    assert "REVERSE = false" in glue


@pytest.mark.parametrize("parameter", ["float* w", "int64_t w_row", "int32_t colour", "int32_t q_column"])
def test_a_parameter_that_the_launcher_does_not_know_is_refused(parameter: str):
    source = SOURCE.replace("int32_t rows", parameter)
    name = parameter.split()[1]
    with pytest.raises(ValueError, match=rf"^linear_attention\.chunk_fwd: .* the kernel parameter '{name}'$"):
        launcher.glue(kernels.FWD, PROBLEM, CONFIG, source)


def test_arguments_say_their_size_and_heads():
    glue = launcher.glue(kernels.FWD, PROBLEM._replace(dtype="bfloat16"), CONFIG, SOURCE)
    token, value, den = (
        "{linattn::TOKEN, false, false, 2, 0}",
        "{linattn::TOKEN, true, false, 2, 0}",
        "TOKEN, false, false, 4, 0}",
    )
    assert f"args[ARGS] = {{{token}, {token}, {value}, {value}, {{linattn::{den}, " in glue
    reverse = dataclasses.replace(kernels.FWD, reverse=True)
    assert "REVERSE = true" in launcher.glue(reverse, PROBLEM, CONFIG, SOURCE)
