"""From a problem on a GPU to a runner, without a GPU: torch's answers about it are made up, and the driver is a stub.

The binary is a real one: lowered, executed under the emulator, compiled, stored and loaded.
"""

import struct
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune import build, cuda_build, emulator, target
from autotune.cuda_toolkit import WATCHED
from autotune.launcher.cuda import CudaBinary
from autotune.target import SHARED_LIMIT
from autotune.verify import VerificationError
from linattn_tl import devices, launchers, linear_attention_decode, loader, preload, registry, repeats, trials, tuning
from linattn_tl.ops import linear_attention as linear_attention_family
from linattn_tl.ops.linear_attention import DECODE_OP, OP
from linattn_tl.ops.linear_attention.cuda import CudaDecode
from linattn_tl.registry import UnsupportedError
from tests.autotune.cuda_binaries import HERE, Stub, build_stub, words
from tl_kernels.linear_attention import cuda
from tl_kernels.linear_attention.cuda_decode import DECODE
from tl_kernels.spec import DTYPES, Problem

K, V = 32, 48
STEP = Problem("linear_attention_decode", "bfloat16", K, V, "cuda")
Pretend = Callable[..., None]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, fresh_choices: None) -> Iterator[Pretend]:
    """pretend((8, 6), ...): torch sees GPUs of these compute capabilities."""
    devices._cuda.cache_clear()

    def pretend(*capabilities: tuple[int, int], capturing: bool = False) -> None:
        found = [
            SimpleNamespace(name=f"GPU {a}.{b}", major=a, minor=b, multi_processor_count=100 + b)
            for a, b in capabilities
        ]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: found[i])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        devices._cuda.cache_clear()

    yield pretend
    devices._cuda.cache_clear()


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    folder = tmp_path_factory.mktemp("stub")
    return Stub(build_stub((HERE / "stub_driver.c").read_text(), folder / "libstub.so"))


@pytest.fixture
def stubbed(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """The loader's CUDA binaries have the stub for a driver."""

    def opened(path: Path) -> CudaBinary:
        binary = CudaBinary(path)
        binary.use_driver(stub.path)
        return binary

    monkeypatch.setattr(loader, "CudaBinary", opened)
    loader._opened.cache_clear()
    stub.reset()
    stub.capability(80)
    yield stub
    loader._opened.cache_clear()


@pytest.fixture(scope="module")
def step() -> loader.Found:
    """The decode kernel for sm_80, in the store of the tests."""
    problem, device = STEP._replace(op="linear_attention"), target.named("sm_80")
    config = DECODE.configs(problem, device)[0]
    entry = loader.build_and_store(DECODE, problem, device, DECODE_OP.compiled["cuda"].trial.check, config)
    return loader.Found(DECODE, config, entry)


# ---- devices


def test_each_gpu_has_its_own_archs(gpus: Pretend):
    gpus((8, 6), (9, 0), (7, 5))
    found = [devices.offered(STEP._replace(index=i)) for i in range(3)]
    assert [[t.arch for t in each] for each in found] == [["sm_86", "sm_80"], ["sm_90a"], []]
    assert (found[1][0].name, found[1][0].cores, found[1][0].smem_bytes) == ("GPU 9.0", 100, 227 * 1024)
    assert devices.refuse(STEP) is None
    said = devices.refuse(STEP._replace(index=2)) or ""
    assert "compute capability 7.5" in said and "sm_80" in said


def test_without_a_gpu(gpus: Pretend):
    gpus()
    assert devices.offered(STEP) == ()
    assert devices.refuse(STEP) == "torch sees no CUDA device"
    assert devices.refuse(STEP._replace(device="mps")) == "no kernel is built for mps tensors"
    assert not devices.capturing(STEP)


def test_the_current_device_stands_for_one_without_an_index(gpus: Pretend, monkeypatch: pytest.MonkeyPatch):
    gpus((8, 0), (8, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [devices.index_of(d) for d in (None, "cpu", "cuda", "cuda:0", torch.device("cuda", 1))] == [0, 0, 1, 0, 1]


# ---- refusals


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float64"}, "dtype float64 is not one of float32"),
        ({"K": 40}, "K=40; CUDA kernels take multiples of 16"),
        ({"V": 272}, "head dims above 256"),
    ],
)
def test_what_no_kernel_can_do(gpus: Pretend, change: dict[str, Any], reason: str):
    gpus((9, 0))
    rows = dict(registry.explain_problem(DECODE_OP, STEP._replace(**change)).rows)
    assert reason in rows["binary"] and reason in rows["jit"]


def test_a_binary_that_is_missing_is_named_with_the_command_that_makes_it(
    gpus: Pretend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LINATTN_TL_CACHE_DIR", str(tmp_path))
    gpus((8, 9))
    said = dict(registry.explain_problem(OP, STEP._replace(op="linear_attention")).rows)["binary"]
    assert "no sm_89 or sm_86 or sm_80 bfloat16 K=32 V=48 binary of forward, carry, scan, emit, backward_q" in said
    assert "`linattn-tl build --arch sm_89 --dims 32x48`" in said
    assert "backward_kv" in said and "backward_k," not in said  # one kernel serves for both where it fits


def test_the_kernels_of_a_pass_that_does_not_fit_whole(gpus: Pretend):
    """Where dk and dv do not fit into one program, there are two."""
    device = target.named("sm_86")
    whole, split = (STEP._replace(op="linear_attention", dtype="float32", K=d, V=d) for d in (32, 256))
    stages = [{k.name.split(".")[1] for k in OP.compiled["cuda"].serving(p, device)} for p in (whole, split)]
    assert "backward_kv" in stages[0] and not stages[0] & {"backward_k", "backward_v"}
    assert "backward_kv" not in stages[1] and stages[1] >= {"backward_k", "backward_v"}
    needed = trials.needed_kernels(whole, device)
    assert {k.name for k in needed} == {f"linear_attention.{s}" for s in {*stages[0], "decode"}}


# ---- serving


def test_a_stored_binary_serves(gpus: Pretend, stubbed: Stub, step: loader.Found):
    """On a GPU of the same generation; loaded on its device when chosen, so that a capture can follow."""
    gpus((8, 0), (8, 6), (9, 0))
    stubbed.devices(3)
    stubbed.capability(86)
    choice = registry.choose(DECODE_OP, STEP._replace(index=1))
    assert choice.backend == "binary" and isinstance(choice.runner, CudaDecode)
    assert choice.runner.decode.config == step.config
    assert stubbed.lines("retain") == ["retain 1"]
    assert dict(registry.explain_problem(DECODE_OP, STEP._replace(index=2)).rows)["binary"].startswith(
        "cannot: no sm_90a bfloat16 K=32 V=48 binary of decode"
    )


def test_a_manifest_says_how_the_kernel_was_verified(step: loader.Found):
    said = step.entry.manifest
    assert said["verified"] == "emulated: clean, and against the float64 definition"
    assert said["static"] == {"K": K, "V": V} and said["config"] == vars(step.config)
    assert said["spill_bytes"] == 0 and said["registers"] <= 255
    assert said["threads"] == max(step.config.threads, K)  # of the two launches of a step


def test_a_driver_that_does_not_fit_is_a_reason(gpus: Pretend, stubbed: Stub, step: loader.Found):
    gpus((8, 0))
    stubbed.fail_at("cuInit", 803)
    explained = registry.explain_problem(DECODE_OP, STEP)
    assert explained.backend == "binary"  # what is known before it is tried
    with pytest.raises(UnsupportedError, match=r"binary: linear_attention\.decode does not load on cuda:0: .*803"):
        registry.choose(DECODE_OP, STEP, "binary")


def test_preload_serves_a_capture(gpus: Pretend, stubbed: Stub, step: loader.Found):
    gpus((8, 0), capturing=True)
    with pytest.raises(UnsupportedError, match=r"came while a CUDA graph was captured; expected linattn_tl\.preload"):
        registry.choose(DECODE_OP, STEP, "binary")
    gpus((8, 0))
    registry.choose(DECODE_OP, STEP, "binary")
    gpus((8, 0), capturing=True)
    assert registry.choose(DECODE_OP, STEP, "binary").backend == "binary"


def test_a_wrong_kernel_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LINATTN_TL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda_build, "lower", lambda *_: None)
    monkeypatch.setattr(emulator, "Emulated", lambda *_, **__: None)
    monkeypatch.setattr(cuda_build, "build", lambda *_: pytest.fail("compiled"))
    problem, device = STEP._replace(op="linear_attention"), target.named("sm_80")

    def wrong(*_: object) -> None:
        raise VerificationError("o has relative RMS error 1.0")

    with pytest.raises(VerificationError):
        loader.build_and_store(DECODE, problem, device, wrong, DECODE.configs(problem, device)[0])
    assert list(loader.user_store().entries()) == []


def test_expected_instructions_are_among_those_counted():
    for kernel, arch in product(cuda.KERNELS, SHARED_LIMIT):
        for dtype in DTYPES:
            found = kernel.expects(STEP._replace(dtype=dtype), target.named(arch))
            assert {word for name in found for word in name.split("|")} <= WATCHED.keys()
    forward = next(k for k in cuda.KERNELS if k.name.endswith(".forward"))
    assert forward.expects(STEP, target.named("sm_90a")) == ("HGMMA", "UTMALDG")


# ---- a step that is made again, see linattn_tl/repeats.py

P, B, H, HV = 5, 3, 2, 4


@pytest.fixture
def stepping(
    gpus: Pretend, stubbed: Stub, step: loader.Found, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """Arguments of the public step, in CPU memory, which comes to the CUDA runner and is known; no GPU needs them."""
    gpus((8, 0))
    runner = registry.choose(DECODE_OP, STEP).runner
    registry._state.chosen[(STEP._replace(device="cpu"), "auto")] = registry.Choice("binary", runner)
    monkeypatch.setattr(launchers, "device_index", lambda x: 0)
    monkeypatch.setattr(launchers, "current_stream", lambda index: 0)
    stubbed.expect_sizes(*[8] * 7)
    arguments = step_arguments()
    for _ in range(repeats.KEEP_AT):
        linear_attention_decode(**arguments)
    monkeypatch.setattr(linear_attention_family, "_step", lambda *args: pytest.fail("went the whole way"))
    stubbed.lines()
    yield arguments


def step_arguments() -> dict[str, Any]:
    q, k, v = (torch.randn(B, heads, d).bfloat16() for heads, d in ((H, K), (H, K), (HV, V)))
    pool = torch.zeros(P, 2, HV, K, V), torch.zeros(P, 2, H, K)  # of two layers
    slots = torch.tensor([4, 0, 2], dtype=torch.int32)
    return {"q": q, "k": k, "v": v, "state": (pool[0][:, 1], pool[1][:, 1]), "slots": slots, "out": torch.empty_like(v)}


def launched_with(stubbed: Stub) -> list[str]:
    """The tensors' addresses that the first of a step's two launches got; the kernel sorts them by name."""
    first, _ = stubbed.lines("launch")
    return words(first, "parameters")


def addresses(arguments: dict[str, Any]) -> list[str]:
    kv, z = arguments["state"]
    tensors = (arguments["k"], kv, arguments["out"], arguments["q"], arguments["slots"], arguments["v"], z)
    return [struct.pack("<q", x.data_ptr()).hex() for x in tensors]


def test_a_step_is_made_again_with_other_tensors(stepping: dict[str, Any], stubbed: Stub):
    first = linear_attention_decode(**stepping)
    assert first is stepping["out"] and launched_with(stubbed) == addresses(stepping)
    others = step_arguments()
    linear_attention_decode(**others)
    assert launched_with(stubbed) == addresses(others)
    made = linear_attention_decode(**{**others, "out": None})
    assert launched_with(stubbed) == addresses({**others, "out": made})
    assert made.shape == others["v"].shape and made.dtype == torch.bfloat16
    assert registry.last_backend("linear_attention_decode") == "binary"


def test_a_step_that_the_driver_refuses(stepping: dict[str, Any], stubbed: Stub):
    versions = [x._version for x in stepping["state"]]
    stubbed.fail_at("cuLaunchKernelEx", 700)
    with pytest.raises(RuntimeError, match=r"linear_attention\.decode.*cuLaunchKernelEx.*700"):
        linear_attention_decode(**stepping)
    assert [x._version for x in stepping["state"]] == versions


@pytest.mark.parametrize("name", ["q", "out"])
def test_a_tensor_at_an_address_that_kernels_do_not_take(
    stepping: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
):
    x = stepping[name]
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    seen: list[Any] = []
    monkeypatch.setattr(linear_attention_family, "_step", lambda *args: seen.append(args))
    linear_attention_decode(**{**stepping, name: shifted})
    assert len(seen) == 1


# ---- what is built


def test_tasks_of_a_build(monkeypatch: pytest.MonkeyPatch):
    """GPU binaries are one a pair of head dims; those of a CPU serve all."""
    seen: list[Any] = []
    monkeypatch.setattr(tuning, "run_tasks", lambda tasks, *_, **__: seen.extend(tasks))
    tuning.build_best(["sm_80"], ["bfloat16"], [(64, 64), (64, 128)])
    assert {(t.K, t.V) for t in seen} == {(64, 64), (64, 128)} and len(set(seen)) == len(seen)
    stages = {t.kernel.split(".")[1] for t in seen}
    assert stages == {k.name.split(".")[1] for k in trials.all_kernels("cuda")} - {"backward_k", "backward_v"}
    best = len(seen)
    seen.clear()
    tuning.build_best(["sm_80"], ["bfloat16"], [(64, 64), (64, 128)], every_config=True)
    assert len(seen) > best and len(set(seen)) == len(seen)
    seen.clear()
    tuning.build_best([target.offered()[0].arch], ["bfloat16"], [(64, 64), (64, 128)])
    assert {(t.K, t.V) for t in seen} == {(64, 64)} and len(seen) == len(trials.all_kernels("cpu"))


def test_a_build_for_head_dims_that_no_kernel_has():
    with pytest.raises(ValueError, match="bfloat16 K=40 V=40 for sm_80: K=40; CUDA kernels take multiples of 16"):
        tuning.build_best(["sm_80"], ["bfloat16"], [(40, 40)])


def test_a_build_for_a_family_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    """Beside one that is there too: nothing is left out without a word."""
    monkeypatch.setattr(tuning, "run_tasks", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(ValueError, match="op is 'quadratic'; expected one of delta_rule, linear_attention"):
        tuning.build_best(["sm_80"], ["bfloat16"], ops=["linear_attention", "quadratic"])


def test_a_build_without_the_toolkit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "missing_tools", lambda device: "nvcc was not found")
    with pytest.raises(RuntimeError, match="kernels for sm_80 cannot be built here: nvcc was not found"):
        tuning.build_best(["sm_80"], ["bfloat16"])


def test_preload_of_a_gpu(gpus: Pretend, stubbed: Stub, step: loader.Found, monkeypatch: pytest.MonkeyPatch):
    gpus((8, 0))
    monkeypatch.setattr(registry, "all_ops", lambda: {OP.name: OP, DECODE_OP.name: DECODE_OP})
    asked: list[Problem] = []
    monkeypatch.setattr(registry, "choose", lambda op, p, backend: asked.append(p) or SimpleNamespace(backend="binary"))
    assert preload(OP.name, K=K, V=V, dtypes=[torch.bfloat16], device="cuda:0") == {
        "linear_attention bfloat16": "binary",
        "linear_attention_decode bfloat16": "binary",
    }
    assert [p.device for p in asked] == ["cuda", "cuda"]
