"""What is refused before a kernel runs, in words that name the argument; and how emitted text is read."""

import dataclasses
import importlib
from importlib import metadata

import numpy as np
import pytest
import torch

from autotune.emulator import EmulatorError, emulate, lower, lowering
from autotune.emulator.arguments import ALIGNMENT, evaluate, prepare, read_only_names
from autotune.emulator.lowering import Lowered, Parameter, Symbol, check_arch
from autotune.emulator.runner import differing, schedule_name


def tensor(name, *shape, dtype="float32", strides=(), **options):
    return Parameter(name, "tensor", dtype, "float*", shape, strides, **options)


def kernel(*parameters, symbols=()):
    return Lowered("gla", "sm_80", "", "", parameters, tuple(Symbol(s, "int") for s in symbols))


Q = tensor("Q", "B", "S", 2)
K = tensor("K", "B", "S", 2)
O = tensor("O", "B", "S", 2, written=True)  # noqa: E741
GLA = kernel(Q, K, O, symbols=("B", "S"))


def arrays(*shapes):
    return [torch.zeros(s) for s in shapes]


# ---- arguments


def test_sizes_come_from_the_shapes():
    given = arrays((1, 65, 2), (1, 65, 2), (1, 65, 2))
    call = prepare(GLA, given, None)
    assert call.sizes == {"B": 1, "S": 65}
    assert [v.value for v in call.values[3:]] == [1, 65, None]
    assert [t.readonly for t in call.tensors] == [True, True, False]


def test_tensors_are_copied_to_device_alignment_and_back():
    given = [torch.randn(1, 3, 2) for _ in range(3)]
    call = prepare(GLA, given, None)
    assert all(t.staged % ALIGNMENT == 0 and t.staged != t.address for t in call.tensors)
    assert all(torch.equal(t.data(), g) for t, g in zip(call.tensors, given, strict=True))
    for t in call.tensors:
        t.data().fill_(7)
        t.copy_back()
    assert (given[2] == 7).all()
    assert not (given[0] == 7).any(), "a read-only argument was changed"


def test_in_place_the_kernel_has_the_memory_itself():
    raw = torch.zeros(3 * ALIGNMENT + 64)
    first = -raw.data_ptr() % ALIGNMENT // 4
    given = [raw[first + i * ALIGNMENT :][:6].view(1, 3, 2) for i in range(3)]
    call = prepare(GLA, given, None, in_place=True)
    assert [t.staged for t in call.tensors] == [t.address for t in call.tensors] == [x.data_ptr() for x in given]
    given[2].fill_(7)
    call.tensors[2].copy_back()
    assert (given[2] == 7).all()
    with pytest.raises(ValueError, match=r"argument K is at 0x\w+; expected a multiple of 256"):
        prepare(GLA, [given[0], given[1].flatten()[1:].new_zeros(8)[2:].view(1, 3, 2), given[2]], None, in_place=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.float8_e5m2])
def test_dtypes(dtype):
    lowered = kernel(tensor("X", 4, dtype=str(dtype).removeprefix("torch.")))
    value = torch.ones(4).to(dtype)
    data = prepare(lowered, [value], None).tensors[0].data()
    assert data.dtype == dtype
    assert torch.equal(data.float(), value.float())


def test_two_names_of_one_fp8():
    value = torch.ones(4).to(torch.float8_e4m3fn)
    for name in ("float8_e4m3", "float8_e4m3fn"):
        assert prepare(kernel(tensor("X", 4, dtype=name)), [value], None).tensors[0].bytes == 4


def test_numpy_arrays():
    x = np.arange(4, dtype=np.float32)
    assert torch.equal(prepare(kernel(tensor("X", 4)), [x], None).tensors[0].data(), torch.arange(4.0))


def test_empty_tensors():
    call = prepare(GLA, arrays((0, 5, 2), (0, 5, 2), (0, 5, 2)), None)
    assert call.sizes == {"B": 0, "S": 5}
    assert call.tensors[0].data().shape == (0, 5, 2)


def test_scalars():
    scale, steps = Parameter("scale", "scalar", "float32", "float"), Parameter("n", "scalar", "int32", "int")
    call = prepare(kernel(scale, steps, tensor("X", "n")), [2, 3, torch.zeros(3)], None)
    assert [v.value for v in call.values[:2]] == [2.0, 3]
    assert call.sizes == {"n": 3}
    with pytest.raises(ValueError, match=r"gla: argument X has shape \(4,\); expected \[n\] = \(3,\) \(n from n\)"):
        prepare(kernel(scale, steps, tensor("X", "n")), [2, 3, torch.zeros(4)], None)


BAD = {
    "count": (GLA, [1], TypeError, "gla: got 1 arguments; expected 3: Q, K, O"),
    "kind": (GLA, [[1.0], 0, 0], TypeError, "gla: argument Q is a list; expected a torch tensor or a numpy array"),
    "device": (
        GLA,
        [torch.zeros(1, 1, 2, device="meta"), 0, 0],
        TypeError,
        "gla: argument Q is on meta; expected a CPU tensor",
    ),
    "dtype": (
        GLA,
        [torch.zeros(1, 1, 2, dtype=torch.float16), 0, 0],
        TypeError,
        "gla: argument Q has dtype float16; expected float32",
    ),
    "rank": (
        GLA,
        arrays((2,), (2,), (2,)),
        ValueError,
        "gla: argument Q has 1 dimensions, (2,); expected 3, (B, S, 2)",
    ),
    "symbol": (
        GLA,
        arrays((1, 65, 2), (1, 64, 2), (1, 65, 2)),
        ValueError,
        "gla: argument K has shape (1, 64, 2); expected [B, S, 2] = (1, 65, 2) (B from Q, S from Q)",
    ),
    "number": (
        GLA,
        arrays((1, 65, 3), (1, 65, 2), (1, 65, 2)),
        ValueError,
        "gla: argument Q has shape (1, 65, 3); expected [B, S, 2] = (1, 65, 2)",
    ),
    "expression": (
        kernel(tensor("X", "n"), tensor("Y", "n * 2 + 1"), symbols=("n",)),
        arrays(4, 8),
        ValueError,
        "gla: argument Y has shape (8,); expected [n * 2 + 1] = (9,) (n from X)",
    ),
    "static": (kernel(tensor("X", 4, 5)), arrays((4, 4)), ValueError, "has shape (4, 4); expected (4, 5)"),
    "layout": (
        GLA,
        [torch.zeros(1, 2, 65).mT, 0, 0],
        ValueError,
        "gla: argument Q is not contiguous; pass Q.contiguous",
    ),
    "strides": (
        kernel(tensor("X", "n", 8, strides=(16, 1)), symbols=("n",)),
        arrays((3, 8)),
        ValueError,
        "gla: argument X is contiguous, with strides (8, 1); the kernel expects (16, 1) = (16, 1)",
    ),
    "integer": (
        kernel(Parameter("n", "scalar", "int32", "int")),
        [1.5],
        TypeError,
        "gla: argument n is a float; expected an integer",
    ),
    "range": (
        kernel(Parameter("n", "scalar", "int32", "int")),
        [1 << 40],
        ValueError,
        "gla: argument n is 1099511627776, which int does not hold",
    ),
    "half scalar": (
        kernel(Parameter("s", "scalar", "float16", "half_t")),
        [1],
        EmulatorError,
        "gla: argument s is a scalar of type half_t",
    ),
    "unsolved": (
        kernel(tensor("X", "n * 2"), symbols=("n",)),
        arrays(4),
        EmulatorError,
        "gla: no argument tells the size n",
    ),
}


@pytest.mark.parametrize(("lowered", "given", "kind", "words"), BAD.values(), ids=BAD)
def test_refused(lowered, given, kind, words):
    with pytest.raises(kind) as error:
        prepare(lowered, given, None)
    assert words in str(error.value)


def test_dynamic_strides_are_those_of_a_contiguous_tensor():
    lowered = kernel(tensor("X", "n", 8, strides=("m", 1)), symbols=("n", "m"))
    assert prepare(lowered, arrays((3, 8)), None).sizes == {"n": 3, "m": 8}


def test_shared_memory_of_two_arguments():
    one = torch.zeros(1, 4, 2)
    prepare(GLA, [one, one, torch.zeros(1, 4, 2)], None)
    with pytest.raises(ValueError, match="gla: arguments O and K share memory, and the kernel writes O"):
        prepare(GLA, [torch.zeros(1, 4, 2), one, one], None)


def test_a_numpy_array_that_cannot_be_written():
    x = np.zeros(4, np.float32)
    x.flags.writeable = False
    prepare(kernel(tensor("X", 4)), [x], None)
    with pytest.raises(ValueError, match="gla: argument X is a numpy array that cannot be written"):
        prepare(kernel(tensor("X", 4, written=True)), [x], None)


def test_readonly():
    assert read_only_names(GLA, None) == {"Q", "K"}
    assert read_only_names(GLA, ["O", 0]) == {"Q", "O"}
    assert read_only_names(GLA, ()) == set()
    for wrong in ("V", 3, -1):
        with pytest.raises(ValueError, match=rf"gla: readonly names '?{wrong}'?; the tensor arguments are Q, K, O"):
            read_only_names(GLA, [wrong])


@pytest.mark.parametrize(
    ("dim", "value"),
    [
        (7, 7),
        ("n", 6),
        ("m", None),
        ("(n + 1) // 2 * 3 - n % 4", 7),
        ("min(n, 4)", 4),
        ("max(n, m)", None),
        ("n // 0", None),
        ("n.x", None),
        ("n +", None),
        ("__import__('os')", None),
    ],
)
def test_shape_expressions(dim, value):
    assert evaluate(dim, {"n": 6}) == value


# ---- results of two schedules


def test_differing_bits():
    one = torch.tensor([[0.0, float("nan"), 1.0]])
    other = torch.tensor([[-0.0, float("nan"), 1.0]])
    assert differing(one, other, 0.0).tolist() == [[True, False, False]]
    assert differing(one.to(torch.bfloat16), one.to(torch.bfloat16), 0.0).tolist() == [[False] * 3]


def test_differing_by_more_than_allowed():
    one = torch.tensor([100.0, 1.0, float("nan"), float("inf")])
    other = torch.tensor([100.0, 1.01, float("nan"), float("inf")])
    assert not differing(one, other, 1e-3).any()
    assert differing(one, other, 1e-5).tolist() == [False, True, False, False]
    assert differing(one, torch.full((4,), float("nan")), 1.0).tolist() == [True, True, False, True]
    assert differing(torch.tensor(1.0), torch.tensor(2.0), 0.0).item() is True


def test_schedule_names():
    assert schedule_name("late", "ascending", 3) == "late, ascending"
    assert schedule_name("random", "shuffled", 3) == "random, shuffled, seed 3"


# ---- lowering


def test_unknown_arch():
    with pytest.raises(ValueError, match="arch is 'sm_90'; the emulator knows sm_80, sm_86, sm_89, sm_90a, sm_100a"):
        check_arch("sm_90")
    with pytest.raises(ValueError, match="arch is 'cuda'"):
        emulate(None, "cuda")


def test_another_tilelang(monkeypatch):
    monkeypatch.setattr(lowering.metadata, "version", lambda name: "0.9")
    with pytest.raises(EmulatorError, match=r"tilelang 0\.9 is installed; the emulator knows the code that 0\.1\.15"):
        lower(None, "sm_80")

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(lowering.metadata, "version", missing)
    with pytest.raises(EmulatorError, match="tilelang is not installed"):
        lower(None, "sm_80")


PROGRAMS = """
import tilelang
import tilelang.language as T

def scaled(width=4):
    n = T.dynamic("n")
    @T.prim_func
    def scale_rows(X: T.Tensor([n * 2, width], "bfloat16"), Keep: T.Tensor([n], "bool"), scale: T.float32,
                   Y: T.Tensor([n * 2, width], "bfloat16"), Total: T.Tensor([width], "float32")):
        with T.Kernel(n, threads=32) as row:
            for i in T.Parallel(width):
                if Keep[row]:
                    Y[row, i] = X[row, i] * T.cast(scale, "bfloat16")
                T.atomic_add(Total[i], 1.0)
    return scale_rows

@tilelang.jit
def compiled(width=4):
    return scaled(width)

def unsupported():
    n = T.dynamic("n")
    @T.prim_func
    def pipelined(X: T.Tensor([n, 64], "float16"), Y: T.Tensor([n, 64], "float16")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared([64, 64], "float16")
            out = T.alloc_fragment([64, 64], "float32")
            for i in T.Pipelined(T.ceildiv(n, 64), num_stages=2):
                T.copy(X[i * 64, 0], tile)
                T.gemm(tile, tile, out, clear_accum=True)
                T.copy(out, Y[i * 64, 0])
    return pipelined
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A module of kernels, as a file: TileLang reads their source."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "emulator_programs.py").write_text(PROGRAMS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield importlib.import_module("emulator_programs")


def test_parameters_of_a_prim_func(programs):
    lowered = lower(programs.scaled(), "sm_80")
    assert lowered.name == "scale_rows"
    assert [p.name for p in lowered.parameters] == ["X", "Keep", "scale", "Y", "Total"]
    x, keep, scale, y, total = lowered.parameters
    assert (x.dtype, x.shape, x.c_type, x.written) == ("bfloat16", ("n * 2", 4), "bfloat16_t*", False)
    assert (keep.dtype, keep.shape) == ("bool", ("n",))
    assert (scale.kind, scale.dtype, scale.c_type) == ("scalar", "float32", "float")
    assert (y.written, y.atomic, total.written, total.atomic) == (True, False, True, True)
    assert lowered.symbols == (Symbol("n", "int"),)
    assert lowered.source.startswith(lowered.kernel_source)
    assert lowering.has_byte_elements(lowered.kernel_source)
    given = [torch.zeros(6, 4).bfloat16(), torch.ones(3) > 0, 2.0, torch.zeros(6, 4).bfloat16(), torch.zeros(4)]
    assert prepare(lowered, given, None).sizes == {"n": 3}


def test_only_prim_funcs(programs):
    for wrong, words in (
        (programs.scaled, r"got function; expected a prim_func .*; call the function that makes it"),
        (programs.compiled, r"got JITImpl; .*; call \.get_tir\(\.\.\.\) of a function under tilelang\.jit"),
        (3, r"got int; expected a prim_func"),
    ):
        with pytest.raises(TypeError, match=words):
            lower(wrong, "sm_80")


def test_what_tilelang_does_not_lower(programs):
    with pytest.raises(EmulatorError) as error:
        lower(programs.unsupported(), "sm_80")
    assert str(error.value).startswith("pipelined: TileLang does not lower it for sm_80: ")
    assert "\n" not in str(error.value)


def test_maps_that_are_stored_through_are_written():
    source = """
extern "C" __global__ void k_kernel(__grid_constant__ const CUtensorMap A_desc, const half_t* __restrict__ B);
extern "C" __global__ void __launch_bounds__(128, 1) k_kernel(__grid_constant__ const CUtensorMap A_desc) {
  tl::tma_load(B_desc, mbarrier[0], (&(((half_t*)b)[0])), 0, 0);
  tl::tma_store<tl::CacheHintSm90::EVICT_FIRST>(A_desc, (&(((half_t*)cs)[0])), 0, 0);
  tl::tma_store_add(C_desc, (&(((half_t*)cs)[0])), 0, 0);
  AtomicAddx4((&(D[0])), v);
}
\tvoid *A_desc_globalAddress= A;
\tvoid *B_desc_globalAddress= B;
\tvoid *C_desc_globalAddress= C + 64;
"""
    assert lowering.written_names(source) == {"A", "C"}
    assert lowering.atomic_names(source) == {"C", "D"}


def test_byte_elements():
    assert not lowering.has_byte_elements(
        "extern __shared__ uchar buf_dyn_shmem[];\n((half_t*)((char*)buf_dyn_shmem + 0))"
    )
    assert lowering.has_byte_elements("(&(((signed char*)a)[0]))")
    assert lowering.has_byte_elements("__shared__ __align__(16) uchar flags[64];")
    assert lowering.has_byte_elements("const fp8_e4_t* __restrict__ A")


def test_lowered_can_be_changed():
    assert dataclasses.replace(GLA, source="mutant").source == "mutant"
