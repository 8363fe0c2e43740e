"""python -m autotune.emulator: what it says of a wrong command, how it makes arguments, and a kernel run through it."""

import json
import os
from pathlib import Path

import pytest
import torch

from autotune.emulator import __main__ as command
from autotune.emulator.__main__ import UsageError, complete_sizes, errors_of, main, make_arrays, pairs, parse_value
from autotune.emulator.lowering import Lowered, Parameter, Symbol

KERNELS = """
import tilelang
import tilelang.language as T
import torch

NUMBER = 3

def double(width=32, dtype="float32"):
    n = T.dynamic("n")
    @T.prim_func
    def double_rows(X: T.Tensor([n, width], dtype), Y: T.Tensor([n, width], dtype), Rows: T.Tensor([1], "float32")):
        with T.Kernel(n, threads=32) as row:
            tile = T.alloc_shared([width], dtype)
            for i in T.Parallel(width):
                tile[i] = X[row, i]
            for i in T.Parallel(width):
                Y[row, i] = tile[width - 1 - i] * 2
            for i in T.Parallel(1):
                T.atomic_add(Rows[0], 1.0)
    return double_rows

def racy():
    @T.prim_func
    def last_thread_wins(Y: T.Tensor([2], "int32")):
        with T.Kernel(1, threads=64) as block:
            Y[0] = T.get_thread_binding()
    return last_thread_wins

@tilelang.jit
def lazily(width=32):
    return double(width)

def other():
    return 7

def broken():
    raise KeyError("D")

def flipped(X, n):
    assert X.shape[0] == n
    return {"Y": X.flip(1) * 2, "Rows": torch.tensor([float(n)])}

def not_flipped(X):
    return {"Y": X * 2}

def of_no_use(X):
    return X
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cli_kernels.py"
    path.write_text(KERNELS)
    return path


def line_of(argv, capsys):
    """What a command that cannot be carried out says in its last line; its exit status is 2."""
    assert main([str(a) for a in argv]) == 2
    text = capsys.readouterr().err.strip().splitlines()[-1]
    assert text.startswith("autotune.emulator: ")
    return text.removeprefix("autotune.emulator: ")


def test_wrong_commands(file, tmp_path, capsys):
    arch = ["--arch", "sm_80"]
    assert line_of([f"{tmp_path}/no.py::double", *arch], capsys) == f"no file {tmp_path}/no.py"
    assert line_of([file, *arch], capsys) == f"got {file}; expected FILE.py::factory"
    assert line_of([f"{file}::triple", *arch], capsys).startswith(
        f"{file} has no triple; it defines double, racy, other, "
    )
    assert line_of([f"{file}::other", *arch], capsys) == f"{file}::other returned int; expected a prim_func"
    assert line_of([f"{file}::NUMBER", *arch], capsys).startswith(f"{file}::NUMBER is int; expected a function")
    assert line_of([f"{file}::broken", *arch], capsys) == f"{file}::broken failed: KeyError: 'D'"
    assert line_of([f"{file}::double", *arch, "--arg", "depth=3"], capsys).startswith(f"{file}::double failed: TypeErr")
    assert line_of([f"{file}::double", *arch, "--arg", "depth"], capsys) == "--arg depth: expected NAME=VALUE"
    assert line_of([f"{file}::double", *arch, "--check", "no"], capsys).startswith(f"{file} has no no; it defines ")


def test_unknown_arch_before_anything_is_done(capsys):
    text = line_of(["no.py::f", "--arch", "sm_80", "--arch", "sm_95"], capsys)
    assert text == "arch is 'sm_95'; the emulator knows sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120a"


def test_a_file_that_cannot_be_imported(tmp_path, capsys):
    path = tmp_path / "cli_broken.py"
    path.write_text("import no_such_module_here\n")
    assert "cannot be imported: ModuleNotFoundError: No module named" in line_of(
        [f"{path}::f", "--arch", "sm_80"], capsys
    )


def test_values():
    assert pairs("--arg", ["D=64", "scale=1e-3", "dtype=float16", "causal=True", "x=a=b"]) == {
        "D": 64,
        "scale": 1e-3,
        "dtype": "float16",
        "causal": True,
        "x": "a=b",
    }
    assert parse_value("") == ""
    with pytest.raises(UsageError, match="--size =3: expected NAME=VALUE"):
        pairs("--size", ["=3"])


PARAMETERS = (
    Parameter("Q", "tensor", "float16", "half_t*", ("S", 4)),
    Parameter("I", "tensor", "int32", "int*", ("S",)),
    Parameter("U", "tensor", "uint8", "uint8_t*", ("S",)),
    Parameter("M", "tensor", "bool", "int8_t*", ("S * 2",)),
    Parameter("scale", "scalar", "float32", "float"),
    Parameter("O", "tensor", "bfloat16", "bfloat16_t*", ("S",), written=True),
    Parameter("C", "tensor", "uint16", "uint16_t*", ("S",), written=True),
    Parameter("E", "tensor", "float8_e4m3", "fp8_e4_t*", ("S",), written=True),
    Parameter("A", "tensor", "float32", "float*", ("S",), written=True, atomic=True),
)
LOWERED = Lowered("mixed", "sm_80", "", "", PARAMETERS, (Symbol("S", "int"),))


def test_inputs_are_random_and_outputs_are_not_what_a_kernel_leaves():
    arrays = make_arrays(LOWERED, {"S": 50, "scale": 2.0}, seed=3)
    again = make_arrays(LOWERED, {"S": 50, "scale": 2.0}, seed=3)
    assert list(arrays) == ["Q", "I", "U", "M", "O", "C", "E", "A"]
    assert all(torch.equal(arrays[n], again[n]) for n in "QIUM")
    assert not torch.equal(arrays["Q"], make_arrays(LOWERED, {"S": 50}, seed=4)["Q"])
    assert arrays["Q"].dtype == torch.float16
    assert 0.3 < arrays["Q"].float().std() < 0.7
    assert set(arrays["I"].tolist()) == set(range(-4, 5))
    assert set(arrays["U"].tolist()) == set(range(5))
    assert arrays["M"].shape == (100,)
    assert arrays["O"].isnan().all()
    assert arrays["E"].float().isnan().all()
    assert set(arrays["C"].tolist()) == {65535}
    assert (arrays["A"] == 0).all()


def test_sizes_are_those_of_the_kernel():
    assert complete_sizes(LOWERED, {"S": 5, "scale": 0.5}) == {"S": 5, "scale": 0.5}
    with pytest.raises(UsageError, match=r"mixed needs --size S=\.\.\. scale=\.\.\."):
        complete_sizes(LOWERED, {})
    with pytest.raises(UsageError, match="--size T: mixed has S, scale"):
        complete_sizes(LOWERED, {"T": 3})
    with pytest.raises(UsageError, match=r"--size S=1\.5: expected a whole number"):
        complete_sizes(LOWERED, {"S": 1.5, "scale": 1})


def test_errors():
    arrays = {"O": torch.tensor([3.0, 4.0])}
    assert errors_of(arrays, {"O": [3.0, 4.5]}, "f") == {"O": pytest.approx(0.5 / (3**2 + 4.5**2) ** 0.5)}
    assert errors_of({"O": torch.tensor([float("nan"), 4.0])}, {"O": [3.0, 4.0]}, "f") == {"O": float("inf")}
    with pytest.raises(UsageError, match="--check f returned list; expected a dict"):
        errors_of(arrays, [1], "f")
    with pytest.raises(UsageError, match="--check f returned P; the kernel has O"):
        errors_of(arrays, {"P": [1]}, "f")
    with pytest.raises(UsageError, match=r"--check f: O has shape \(1,\); the kernel's \(2,\)"):
        errors_of(arrays, {"O": [1.0]}, "f")


def test_source_lines_are_numbered():
    assert command.numbered("a\nb") == "    1 a\n    2 b"


# ---- through the compiler


@pytest.fixture
def cache():
    """The folder of the other tests, so that the runtime is built once."""
    return Path(os.environ["LINATTN_TL_CACHE_DIR"]) / "emulator"


def test_a_clean_kernel(file, cache, capsys):
    options = ["--arch", "sm_80", "--size", "n=3", "--schedule", "all", "--check", "flipped", "--cache", str(cache)]
    assert main([f"{file}::double", *options]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("clean -- double_rows on sm_80 n=3, 3 blocks")
    assert "schedule late, ascending; early, greedy; random, shuffled, seed 1; random, shuffled, seed 2" in out
    assert "  Y: relative RMS error 0.00e+00, ok" in out
    assert "  Rows: relative RMS error 0.00e+00, ok" in out
    assert err.startswith("sm_80: lowering ... ")
    assert "building ... " in err


def test_wrong_values(file, cache, capsys):
    options = ["--arch", "sm_80", "--size", "n=3", "--cache", str(cache), "--check"]
    assert main([f"{file}::double", *options, "not_flipped"]) == 1
    assert "WRONG (at most 0.02)" in capsys.readouterr().out
    assert "of_no_use returned Tensor; expected a dict" in line_of([f"{file}::double", *options, "of_no_use"], capsys)


def test_what_depends_on_the_schedule(file, cache, capsys):
    assert main([f"{file}::racy", "--arch", "sm_80", "--schedule", "all", "--cache", str(cache)]) == 1
    out = capsys.readouterr().out
    assert "NOT CLEAN: 1 race, 1 schedule -- " in out
    assert "race: write of Y at byte 0 by thread 1 (line " in out
    assert "Y depends on the schedule: 1 of 2 elements; the first is Y[0], 63 under (late, ascending) and" in out


def test_json_of_two_architectures(file, cache, capsys):
    options = ["--arch", "sm_80", "--arch", "sm_90a", "--size", "n=2", "--json", "--cache", str(cache)]
    assert main([f"{file}::lazily", "--arg", "width=64", *options]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert [(r["arch"], r["clean"], r["blocks"]) for r in reports] == [("sm_80", True, 2), ("sm_90a", True, 2)]
    assert all(r["counters"]["global_read"] >= 2 * 64 * 4 for r in reports)


def test_sizes_are_asked_for(file, cache, capsys):
    argv = [f"{file}::double", "--arch", "sm_80", "--cache", cache]
    assert line_of(argv, capsys) == "double_rows needs --size n=..."
    assert line_of([*argv, "--size", "n=2", "k=3"], capsys) == "--size k: double_rows has n"
