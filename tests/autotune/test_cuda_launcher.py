"""Launching CUDA binaries, against a stub driver that writes down what it is asked."""

import dataclasses
import re
import shutil
import struct
import subprocess
import sys
import threading
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune import build, cuda_toolkit
from autotune.emulator.lowering import Lowered
from autotune.launcher import cuda as launcher
from autotune.launcher.cuda import CudaBinary
from tests.autotune import cuda_programs
from tests.autotune.cuda_binaries import HERE, Stub, build_stub, compiled, linked, words
from tests.autotune.emulator import kernels

A, B, C, D = 0x7F0000001000, 0x7F0000002010, 0x7F0000003020, 0x7F0000004030  # of tensors
STREAM = 0x7FFF12345678


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    folder = tmp_path_factory.mktemp("stub")
    return Stub(build_stub((HERE / "stub_driver.c").read_text(), folder / "libstub.so"))


@pytest.fixture
def stub(stub_library: Stub) -> Iterator[Stub]:
    stub_library.reset()
    yield stub_library
    assert stub_library.depth() == 0, "a context was left current"
    assert stub_library.mode() == 0, "the capture mode was left changed"


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., CudaBinary]:
    folder, made = tmp_path_factory.mktemp("objects"), {}

    def get(arch: str, factory: Callable[..., Any], *sizes: Any, **options: Any) -> CudaBinary:
        key = (arch, factory, sizes, tuple(options.items()))
        if key not in made:
            made[key] = linked(*compiled(arch, factory, *sizes, **options), folder / f"{len(made)}.so")
        return made[key]

    return get


@pytest.fixture
def attention(objects: Callable[..., CudaBinary], stub: Stub) -> CudaBinary:
    """Its tensors are Q, K, V, O [B, L, 2, 64] in fp16; B and L are dynamic; grid (2, B)."""
    return attached(objects("sm_90a", kernels.linear_attention, 2, 64), stub, 8, 8, 8, 8, 4, 4)


def attached(binary: CudaBinary, stub: Stub, *sizes: int) -> CudaBinary:
    binary.use_driver(stub.path)
    stub.expect_sizes(*sizes)
    return binary


def attend(
    binary: CudaBinary, sizes: tuple[int, int] = (3, 100), device: int = 0, stream: int = STREAM, first: int = A
) -> None:
    binary(binary.addresses(device, stream, first, B, C, D) + binary.fixed(*sizes))


def pointer(address: int) -> str:
    return struct.pack("<q", address).hex()


def int32(number: int) -> str:
    return struct.pack("<i", number).hex()


# ---- what is loaded and passed


def test_a_call_loads_launches_and_leaves(attention: CudaBinary, stub: Stub):
    attend(attention)
    assert (attention.tensors, attention.numbers) == (("Q", "K", "V", "O"), ("B", "L"))
    assert stub.lines() == [
        "retain 0",
        "push 1000",
        "load 2000 in 1000 mode 2 magic ba55ed50",  # a fat binary, under the relaxed capture mode
        "function 3000 of 2000 is program_kernel",
        "attribute 8 of 3000 is 40960",  # dynamic shared memory
        "pop 1000",
        "push 1000",
        f"launch 3000 in 1000 grid 2 3 1 block 128 1 1 shared 40960 stream {STREAM:x} attributes parameters "
        # TileLang sorts the parameters of the kernel by name: K, O, Q, V
        f"{pointer(B)} {pointer(D)} {pointer(A)} {pointer(C)} {int32(3)} {int32(100)}",
        "pop 1000",
    ]


def test_a_second_call_only_launches(attention: CudaBinary, stub: Stub):
    attend(attention)
    stub.lines()
    attend(attention, (5, 1), stream=0)
    push, launch, pop = stub.lines()
    assert (push, pop) == ("push 1000", "pop 1000")
    assert words(launch, "grid", "block") == ["2", "5", "1"]
    assert words(launch, "stream", "attributes") == ["0"]
    assert words(launch, "parameters")[4:] == [int32(5), int32(1)]


def test_scalars_are_converted(objects: Callable[..., CudaBinary], stub: Stub):
    binary = attached(objects("sm_80", kernels.affine, 128), stub, 8, 8, 8, 4, 4, 4, 4)
    stub.capability(80)
    assert binary.tensors == ("X", "S", "Y")
    assert binary.numbers == ("limit", "scale", "B", "L")
    binary(binary.addresses(0, STREAM, A, B, C) + binary.fixed(-7, 0.1, 3, 65))
    (launch,) = stub.lines("launch")
    assert words(launch, "grid", "block") == ["2", "3", "1"]
    scale = struct.pack("<f", 0.1).hex()
    order = [pointer(B), pointer(A), pointer(C), int32(3), int32(65), int32(-7), scale]  # S, X, Y, B, L, limit, scale
    assert words(launch, "parameters") == order


def test_tensor_maps_are_encoded_and_passed(objects: Callable[..., CudaBinary], stub: Stub):
    """The stub refuses maps that are not aligned, as the driver does."""
    binary = attached(objects("sm_90a", kernels.gemm, 256, 128, 192, staged=True), stub, 128, 128, 128)
    binary(binary.addresses(0, STREAM, A, C, D))
    *maps, launch = stub.lines("tensor_map", "launch")
    assert maps == [
        f"tensor_map {A:#x} type 6 dims 192 256 strides 384 box 32 64 swizzle 2",
        f"tensor_map {C:#x} type 6 dims 128 192 strides 256 box 64 32 swizzle 3",
        f"tensor_map {D:#x} type 7 dims 128 256 strides 512 box 32 64 swizzle 3",
    ]
    passed = words(launch, "parameters")
    assert [p[:16] for p in passed] == [pointer(A), pointer(C), pointer(D)]
    assert all(len(p) == 256 and p.endswith(pointer(0x7E57)) for p in passed)


def test_tensor_maps_follow_dynamic_sizes(objects: Callable[..., CudaBinary], stub: Stub):
    binary = attached(objects("sm_90a", kernels.tiles, 128, None, (64, 64), 2), stub, 128, 8, 4)
    binary(binary.addresses(0, STREAM, A, B) + binary.fixed(200))
    (encoded,) = stub.lines("tensor_map")
    assert encoded == f"tensor_map {A:#x} type 6 dims 200 128 strides 400 box 64 64 swizzle 0"
    binary(binary.addresses(0, STREAM, A, B) + binary.fixed(1 << 30))  # its bytes do not fit 32 bits
    (encoded,) = stub.lines("tensor_map")
    assert words(encoded, "strides", "box") == [str(1 << 31)]


def test_kernels_of_one_function_follow_one_another(objects: Callable[..., CudaBinary], stub: Stub):
    binary = attached(objects("sm_90a", cuda_programs.two_stages, 256), stub, 8, 8, 4)
    binary(binary.addresses(0, STREAM, A, B, C) + binary.fixed(6))
    first, second = stub.lines("launch")
    assert [words(first, "grid", "shared"), words(second, "grid", "shared")] == [
        ["6", "1", "1", "block", "128", "1", "1"],
        ["2", "1", "1", "block", "64", "1", "1"],
    ]
    assert words(first, "parameters") == [pointer(A), pointer(B), int32(6)]
    assert words(second, "parameters") == [pointer(B), pointer(C), int32(6)]
    assert first.split()[1] != second.split()[1]


# ---- contexts, devices, streams


def test_whatever_context_was_current_is_current_again(attention: CudaBinary, stub: Stub):
    stub.push(0xABC)
    attend(attention)
    assert (stub.current(), stub.depth()) == (0xABC, 1)
    (launch,) = stub.lines("launch")
    assert " in 1000 " in launch
    stub.reset()


def test_a_context_that_is_current_is_not_pushed(attention: CudaBinary, stub: Stub):
    attention.preload(0)
    stub.push(0x1000)
    stub.lines()
    attend(attention)
    assert [line.split()[0] for line in stub.lines()] == ["launch"]
    stub.reset()


def test_another_device_than_the_current_one(attention: CudaBinary, stub: Stub):
    stub.devices(3)
    attend(attention)
    stub.push(0x1000)  # torch.cuda.current_device() is 0
    stub.lines()
    attend(attention, device=2)
    lines = stub.lines()
    assert lines[:3] == ["retain 2", "push 1002", "load 2001 in 1002 mode 2 magic ba55ed50"]
    assert [line.split()[:4] for line in lines if line.startswith("launch")] == [["launch", "3001", "in", "1002"]]
    assert stub.current() == 0x1000
    attend(attention, device=2)
    assert [line.split()[0] for line in stub.lines()] == ["push", "launch", "pop"]
    stub.reset()


def test_threads_load_once(attention: CudaBinary, stub: Stub):
    stub.devices(2)
    start = threading.Barrier(8)
    failed = []

    def run(i: int) -> None:
        start.wait()
        try:
            for _ in range(50):
                attend(attention, device=i % 2, stream=i)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    lines = stub.lines("load", "launch")
    assert sum(line.startswith("load") for line in lines) == 2
    launches = [line for line in lines if line.startswith("launch")]
    assert len(launches) == 400
    for line in launches:  # the stream of an even thread is on device 0
        assert int(words(line, "stream", "attributes")[0], 16) % 2 == int(line.split()[3], 16) - 0x1000


def test_preloading_loads_and_does_not_launch(attention: CudaBinary, stub: Stub):
    attention.preload(0)
    attention.preload(0)
    assert [line.split()[0] for line in stub.lines()] == ["retain", "push", "load", "function", "attribute", "pop"]


def test_a_graph_can_be_captured_after_preloading(attention: CudaBinary, stub: Stub):
    attention.preload(0)
    stub.capturing(1)
    attend(attention)
    assert len(stub.lines("launch")) == 1


def test_a_capture_without_preloading_is_refused(attention: CudaBinary, stub: Stub):
    stub.capturing(1)
    with pytest.raises(
        RuntimeError, match=r"^family\.stage: not loaded on device 0, and its stream is capturing .* preload it first$"
    ):
        attend(attention)
    assert stub.lines() == []


# ---- empty inputs


@pytest.mark.parametrize("sizes", [(0, 100), (0, 0)])
def test_without_blocks_nothing_is_launched(attention: CudaBinary, stub: Stub, sizes: tuple[int, int]):
    attend(attention, sizes, first=0)
    assert stub.lines("launch", "tensor_map") == []


def test_an_empty_tensor_has_no_map_and_needs_none_without_blocks(objects: Callable[..., CudaBinary], stub: Stub):
    binary = attached(objects("sm_90a", cuda_programs.rows_by_tiles, 64), stub, 128, 128)
    binary(binary.addresses(0, STREAM, 0, 0) + binary.fixed(0))
    assert stub.lines("launch", "tensor_map") == []


def test_an_empty_tensor_that_would_be_read_by_tiles_is_refused(objects: Callable[..., CudaBinary], stub: Stub):
    """The driver takes no map of it, and what a map of something else did nobody knows."""
    binary = attached(objects("sm_90a", kernels.tiles, 128, None, (64, 64), 2), stub, 128, 8, 4)
    with pytest.raises(ValueError, match=r"^family\.stage: program_kernel: a tensor .* is empty, but its grid is not$"):
        binary(binary.addresses(0, STREAM, A, B) + binary.fixed(0))
    assert stub.lines("launch") == []


# ---- errors


NAMED = "CUDA_ERROR_OUT_OF_MEMORY (2), in the stub's words"
AT_LOADING = ("cuInit", "cuDevicePrimaryCtxRetain", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute")


@pytest.mark.parametrize("call", [*AT_LOADING, "cuCtxPushCurrent_v2", "cuCtxGetCurrent", "cuLaunchKernelEx"])
def test_what_the_driver_says_is_passed_on(attention: CudaBinary, stub: Stub, call: str):
    """And the next call works: nothing is left half done."""
    stub.fail_at(call, 2)
    with pytest.raises(RuntimeError) as failure:
        attend(attention)
    text = str(failure.value)
    assert text.startswith(f"family.stage: {call.removesuffix('_v2')}")
    assert text.endswith(NAMED)
    assert stub.depth() == 0
    lines = stub.lines()
    loaded = [line.split()[1] for line in lines if line.startswith("load")]
    unloaded = [line.split()[1] for line in lines if line.startswith("unload")]
    names = [line.split()[0] for line in lines]
    if call in AT_LOADING or call.startswith("cuCtxPush"):
        assert loaded == unloaded
        assert names.count("retain") == names.count("release")
    stub.fail_at("", 0)
    attend(attention)
    assert len(stub.lines("launch")) == 1


def test_a_context_that_cannot_be_left_is_an_error(attention: CudaBinary, stub: Stub):
    attention.preload(0)
    stub.fail_at("cuCtxPopCurrent_v2", 2)
    with pytest.raises(RuntimeError, match="cuCtxPopCurrent: CUDA_ERROR_OUT_OF_MEMORY"):
        attend(attention)
    stub.reset()


def test_a_failed_launch_says_what_was_launched(attention: CudaBinary, stub: Stub):
    stub.fail_at("cuLaunchKernelEx", 700)
    with pytest.raises(RuntimeError) as failure:
        attend(attention)
    assert str(failure.value) == (
        "family.stage: cuLaunchKernelEx of program_kernel on device 0, grid 2 x 3 x 1, block 128, 40960 bytes of "
        "shared memory: CUDA_ERROR_ILLEGAL_ADDRESS (700), in the stub's words; an earlier kernel may have caused it, "
        "since launches are asynchronous"
    )


def test_a_failed_tensor_map_is_described(objects: Callable[..., CudaBinary], stub: Stub):
    binary = attached(objects("sm_90a", kernels.tiles, 128, None, (64, 64), 2), stub, 128, 8, 4)
    with pytest.raises(RuntimeError) as failure:
        binary(binary.addresses(0, STREAM, A, B) + binary.fixed(100))  # rows of 200 bytes
    assert str(failure.value) == (
        f"family.stage: cuTensorMapEncodeTiled for address {A:#x}, sizes 100 128, strides in bytes 200: "
        "CUDA_ERROR_INVALID_VALUE (1), in the stub's words (Error: Failed to initialize the TMA descriptor X_desc)"
    )
    assert stub.lines("launch") == []


def test_an_error_the_driver_does_not_know(attention: CudaBinary, stub: Stub):
    stub.fail_at("cuLaunchKernelEx", 4321)
    with pytest.raises(RuntimeError, match=r": unknown error \(4321\), which this driver does not describe$"):
        attend(attention)


def test_each_thread_has_its_own_error(attention: CudaBinary, stub: Stub):
    attention.preload(0)
    seen = {}

    def run(name: str, address: int) -> None:
        for _ in range(200):
            try:
                attend(attention, first=address)
            except ValueError as error:
                seen.setdefault(name, set()).add(str(error))

    threads = [threading.Thread(target=run, args=(f"{i}", 0x1001 + 16 * i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(seen[f"{i}"]) for i in range(4)] == [1, 1, 1, 1]
    assert f"{0x1031:#x}" in seen["3"].pop()


@pytest.mark.parametrize("at", range(4))
def test_a_tensor_that_begins_between_is_refused(attention: CudaBinary, stub: Stub, at: int):
    tensors = [A, B, C, D]
    tensors[at] += 8
    name = "QKVO"[at]
    with pytest.raises(ValueError, match=rf"^family\.stage: {name} is at address {tensors[at]:#x}; .* multiple of 16$"):
        attention(attention.addresses(0, STREAM, *tensors) + attention.fixed(3, 100))
    assert stub.lines() == []


@pytest.mark.parametrize(("sizes", "words"), [((1 << 31, 1), "B is 2147483648"), ((1, -(1 << 31) - 1), "L is -")])
def test_a_size_that_does_not_fit_is_refused(attention: CudaBinary, stub: Stub, sizes: tuple[int, int], words: str):
    with pytest.raises(ValueError, match=rf"^family\.stage: {words}.*does not hold$"):
        attend(attention, sizes)
    assert stub.lines() == []


@pytest.mark.parametrize("B", [65536, -1])
def test_a_grid_that_cannot_be_launched_is_refused(attention: CudaBinary, stub: Stub, B: int):
    with pytest.raises(ValueError, match=rf"^family\.stage: program_kernel: a grid of 2 x {B} x 1 blocks; at most "):
        attend(attention, (B, 100))
    assert stub.lines("launch") == []


@pytest.mark.parametrize("device", [-1, 64, 1 << 40])
def test_a_device_index_out_of_range_is_refused(attention: CudaBinary, stub: Stub, device: int):
    with pytest.raises(ValueError, match=rf"^family\.stage: device index is {device}; expected 0 to 63$"):
        attend(attention, device=device)
    with pytest.raises(ValueError, match="device index"):
        attention.preload(device)


def test_a_device_that_is_not_there(attention: CudaBinary, stub: Stub):
    with pytest.raises(RuntimeError, match="cuDeviceGet of device 5: CUDA_ERROR_INVALID_DEVICE"):
        attend(attention, device=5)


# ---- drivers and GPUs that do not fit


def test_without_a_driver_it_loads_and_a_call_says_so(attention: CudaBinary, tmp_path: Path):
    attention.use_driver(tmp_path / "libcuda.so.1")
    for call in (attend, lambda binary: binary.preload(0)):
        with pytest.raises(
            RuntimeError, match=r"^family\.stage: no NVIDIA driver \(libcuda\.so\.1\) on this machine: .*No such file"
        ):
            call(attention)


ALONE = """
import sys
from pathlib import Path
from autotune.launcher.cuda import CudaBinary
binary = CudaBinary(Path(sys.argv[1]))
binary.use_driver(Path("/nowhere/libcuda.so.1"))
try:
    binary(binary.addresses(0, 0, 0, 0, 0, 0) + binary.fixed(1, 1))
except RuntimeError as error:
    print(error)
print(sorted({"torch", "tilelang", "tvm_ffi", "numpy"} & sys.modules.keys()))
print(sorted(w for w in ("libcuda", "libtorch", "libtvm", "libnvrtc") if w in open("/proc/self/maps").read()))
"""


def test_it_loads_alone(attention: CudaBinary):
    """No torch, no tilelang, no CUDA library, and no compiler on PATH."""
    command = [sys.executable, "-c", ALONE, str(attention.path)]
    environment = {"PYTHONPATH": str(build.ROOT), "PATH": "/nowhere"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    said, modules, libraries = done.stdout.splitlines()
    assert "no NVIDIA driver" in said
    assert (modules, libraries) == ("[]", "[]")


def test_an_old_driver_is_named_with_what_is_needed(attention: CudaBinary, stub: Stub):
    built = cuda_toolkit.toolkit().version.rsplit(".", 1)[0]
    major = int(built.split(".")[0])
    needed = launcher.MINIMUM_DRIVER[major]
    stub.version(1000 * (major - 1) + 40)
    with pytest.raises(RuntimeError) as failure:
        attend(attention)
    assert str(failure.value) == (
        f"family.stage: the NVIDIA driver is for CUDA {major - 1}.4; this binary was built with CUDA {built} and needs "
        f"a driver for CUDA {major}.0 ({needed} or newer)"
    )
    stub.version(1000 * major)  # an older release of the same generation will do
    attend(attention)
    assert len(stub.lines("launch")) == 1


def test_a_driver_that_lacks_a_function_is_named_with_what_is_needed(attention: CudaBinary, tmp_path: Path):
    old = build_stub("int cuInit(unsigned flags) { return 0; }", tmp_path / "libold.so")
    attention.use_driver(old)
    with pytest.raises(RuntimeError, match=r"has no cuDriverGetVersion; this binary needs driver \d{3} or newer$"):
        attend(attention)


def test_a_machine_with_a_driver_and_no_device(attention: CudaBinary, stub: Stub):
    stub.devices(0)
    with pytest.raises(RuntimeError, match=r"^family\.stage: cuInit: CUDA_ERROR_NO_DEVICE \(100\)"):
        attend(attention)


@pytest.mark.parametrize(
    ("arch", "capability", "fits"),
    [
        ("sm_90a", 90, True),
        ("sm_90a", 89, False),
        ("sm_90a", 100, False),
        ("sm_80", 80, True),
        ("sm_80", 86, True),
        ("sm_86", 89, True),
        ("sm_86", 80, False),
        ("sm_80", 75, False),
        ("sm_80", 90, False),
    ],
)
def test_a_device_of_another_kind_is_refused(
    objects: Callable[..., CudaBinary], stub: Stub, arch: str, capability: int, fits: bool
):
    binary = attached(objects(arch, kernels.affine, 128), stub, 8, 8, 8, 4, 4, 4, 4)
    stub.capability(capability)
    if fits:
        return binary.preload(0)
    has = f"{capability // 10}\\.{capability % 10}"
    with pytest.raises(
        RuntimeError, match=rf"^family\.stage: built for {arch}; device 0 has compute capability {has}$"
    ):
        binary.preload(0)
    assert stub.lines() == []


# ---- the object


def output_of(tool: str, *arguments: object) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not on PATH")
    return subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def test_an_object_needs_an_old_c_library_alone(attention: CudaBinary):
    """R19: no torch, no Python, no CUDA library, no C++ library, and a glibc of 2012 would do."""
    listed = output_of("readelf", "--dynamic", "--version-info", "--wide", attention.path)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", listed)
    assert set(needed) <= {"libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", listed)}
    assert versions and max(versions) <= (2, 14)


def test_an_object_exports_its_entries_alone(attention: CudaBinary):
    symbols = output_of("nm", "--dynamic", "--defined-only", attention.path).split()[2::3]
    entries = ("about", "error", "image", "image_end", "launch", "preload", "use_driver")
    assert sorted(symbols) == [f"linattn_{name}" for name in entries]


def test_the_image_can_be_taken_out(attention: CudaBinary):
    lowered, cubin = compiled("sm_90a", kernels.linear_attention, 2, 64)
    assert attention.image() == cuda_toolkit.pack_image(cubin.data, lowered.arch)


CONSTANTS = {  # ours -> the toolkit's
    "MAX_DYNAMIC_SHARED_SIZE_BYTES": "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
    "CAPABILITY_MAJOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
    "CAPABILITY_MINOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
    "CAPTURE_MODE_RELAXED": "CU_STREAM_CAPTURE_MODE_RELAXED",
    "CAPTURE_STATUS_NONE": "CU_STREAM_CAPTURE_STATUS_NONE",
    "PROGRAMMATIC_STREAM_SERIALIZATION": "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION",
    "INVALID_VALUE": "CUDA_ERROR_INVALID_VALUE",
    "ILLEGAL_ADDRESS": "CUDA_ERROR_ILLEGAL_ADDRESS",
    "MISALIGNED_ADDRESS": "CUDA_ERROR_MISALIGNED_ADDRESS",
    "LAUNCH_FAILED": "CUDA_ERROR_LAUNCH_FAILED",
}
LAUNCH_CONFIG = ("gridDimX", "gridDimZ", "blockDimX", "blockDimZ", "sharedMemBytes", "hStream", "attrs", "numAttrs")
LAYOUT = (
    *(f"offsetof(CUlaunchConfig, {field})" for field in LAUNCH_CONFIG),
    *(f"sizeof({name})" for name in ("CUlaunchConfig", "CUlaunchAttribute", "CUtensorMap", "CUdevice", "CUresult")),
    "offsetof(CUlaunchAttribute, value)",
    "128 % alignof(CUtensorMap)",
    "sizeof(CUtensorMapDataType)",
)


def test_structures_are_those_of_the_toolkit(tmp_path: Path):
    """cuda_driver.h declares by hand what it uses of the driver; where the toolkit is at hand, they are compared."""
    toolkit = Path(cuda_toolkit.toolkit().nvcc).resolve().parents[1] / "include"
    folders = [path for path in (toolkit, cuda_toolkit.SYSTEM.parent / "include") if (path / "cuda.h").exists()]
    if not folders:
        pytest.skip("the toolkit's cuda.h is not here")
    symbols = re.findall(r'X\((\w+), "(\w+)"', launcher.DRIVER_HEADER.read_text())
    assert len(symbols) > 15
    # the toolkit's header maps names onto versions by macros, such as cuCtxPushCurrent onto cuCtxPushCurrent_v2
    text = "#define TEXT_(x) #x\n#define TEXT(x) TEXT_(x)\n#include <cuda.h>\n"
    theirs = [*LAYOUT, *CONSTANTS.values()], [f"TEXT({name})" for name, _ in symbols]
    binary = '#define LINATTN_BINARY {"", "", 0, false, 0, 0, 0}\n#define LINATTN_FUNCTIONS {"", 0, false}\n'
    image = 'extern "C" const char linattn_image[] = {0};\n'
    ours = [*LAYOUT, *(f"linattn::{name}" for name in CONSTANTS)], [f'"{symbol}"' for _, symbol in symbols]
    expected = printed(text, *theirs, folders[0], tmp_path)
    assert printed(f'{binary}#include "cuda.h"\n{image}', *ours, launcher.HEADER.parent, tmp_path) == expected


def printed(head: str, numbers: list[str], texts: list[str], include: Path, folder: Path) -> list[str]:
    """What C++ expressions are, as a program prints them."""
    body = "".join(f'printf("%d\\n", (int)({number}));\n' for number in numbers)
    body += "".join(f'printf("%s\\n", {text});\n' for text in texts)
    file = folder / "main.cpp"
    file.write_text(f"#include <cstddef>\n#include <cstdio>\n{head}int main() {{\n{body}}}\n")
    command = ["g++", "-std=c++17", "-w", f"-I{include}", str(file), "-o", str(folder / "main"), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return subprocess.run([folder / "main"], check=True, capture_output=True, text=True).stdout.splitlines()


# ---- reading TileLang's host code


def changed(lowered: Lowered, old: str, new: str) -> Lowered:
    assert old in lowered.source
    return dataclasses.replace(lowered, source=lowered.source.replace(old, new))


@pytest.fixture
def affine() -> tuple[Lowered, cuda_toolkit.Cubin]:
    return compiled("sm_90a", kernels.affine, 128)


def test_a_kernel_that_waits_for_earlier_ones_may_start_before_they_end(affine: Any, stub: Stub, tmp_path: Path):
    lowered, cubin = affine
    lowered = changed(lowered, ") {\n  extern", ") {\n  cudaGridDependencySynchronize();\n  extern")
    assert [f.waits_for_earlier for f in launcher.read_functions(lowered.source)] == [True]
    binary = attached(linked(lowered, cubin, tmp_path / "waits.so"), stub, 8)
    binary(binary.addresses(0, STREAM, A, B, C) + binary.fixed(1, 1.0, 1, 1))
    (launch,) = stub.lines("launch")
    assert words(launch, "attributes", "parameters") == ["6=1"]


def test_no_other_kernel_may(affine: Any, stub: Stub, tmp_path: Path):
    """TileLang asks for it at every launch."""
    lowered, cubin = affine
    assert "programmaticStreamSerializationAllowed = 1" in lowered.source
    binary = attached(linked(lowered, cubin, tmp_path / "waits_not.so"), stub, 8)
    binary(binary.addresses(0, STREAM, A, B, C) + binary.fixed(1, 1.0, 1, 1))
    (launch,) = stub.lines("launch")
    assert "attributes parameters" in launch


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("config.numAttrs = 1;", "attribute[1].id = cudaLaunchAttributeClusterDimension;", "ClusterDimension"),
        ("cudaLaunchKernelEx(&config, program_kernel,", "cudaLaunchCooperativeKernel(&config, program_kernel,", "Coop"),
        ("config.numAttrs = 1;", "cudaStreamSetAttribute(stream, 0, 0);", "cudaStreamSetAttribute"),
        ("config.numAttrs = 1;", "(cuTensorMapEncodeIm2col)(0);", "cuTensorMapEncodeIm2col"),
    ],
)
def test_what_the_launcher_has_not_got_is_named(affine: Any, tmp_path: Path, old: str, new: str, named: str):
    lowered, cubin = affine
    with pytest.raises(build.BuildError, match=rf"^the host code uses \w*{named}\w*, which the launcher has not got$"):
        linked(changed(lowered, old, new), cubin, tmp_path / "out.so")
    assert not (tmp_path / "out.so").exists()


def test_parameters_that_the_compiled_code_has_not_got_are_noticed(affine: Any, tmp_path: Path):
    lowered, cubin = affine
    lowered = changed(lowered, "int limit, float scale)", "int64_t limit, float scale)")
    with pytest.raises(build.BuildError, match="program_kernel: the compiled code has other parameters"):
        linked(lowered, cubin, tmp_path / "out.so")


@pytest.mark.parametrize(
    ("source", "words"),
    [("int x;", "no host wrapper"), ("#define ERROR_BUF_SIZE 1024\n", "no kernel with launch bounds")],
)
def test_a_source_of_another_form_is_refused(source: str, words: str):
    with pytest.raises(launcher.LauncherError, match=words):
        launcher.read_functions(source)


def test_a_generation_of_cuda_that_is_not_known_is_refused():
    about = launcher.About("family.stage", "sm_90a", 14000, (), ())
    with pytest.raises(launcher.LauncherError, match=r"^CUDA 14 .* drivers are known for 12, 13$"):
        _ = about.minimum_driver


# ---- cost


def test_a_call_costs_little(attention: CudaBinary, stub: Stub, capsys: pytest.CaptureFixture[str]):
    """The target is 2 us of Python and host code for a decode call; the bound leaves room for a busy machine."""
    attention.preload(0)
    stub.push(0x1000)
    stub.quiet(1)
    fixed, addresses = attention.fixed(1, 1), attention.addresses
    best = min(timeit.repeat(lambda: attention(addresses(0, STREAM, A, B, C, D) + fixed), number=5000, repeat=9)) / 5000
    with capsys.disabled():
        print(f" [{1e6 * best:.2f} us] ", end="")
    assert best < 6e-6
    stub.reset()
