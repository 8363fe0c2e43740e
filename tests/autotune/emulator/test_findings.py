"""Kernels broken by hand, each in one way: every run must say so, in the right words and at the right line.

`mirror` is small enough to be edited by its text. The other two are a product by cp.async on sm_80 and one by TMA and
wgmma on sm_90a.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.autotune.emulator import kernels

# the statements of `mirror`, as TileLang emits them
FILL = "x[((int)threadIdx.x)] = X[((((int)blockIdx.x) * 128) + ((int)threadIdx.x))];"
SYNC = "__syncthreads();"
TURN = "y[(((int)threadIdx.x) & 3)] = x[(127 - ((int)threadIdx.x))];"
STORE = "Y[((((int)blockIdx.x) * 128) + ((int)threadIdx.x))] = y[(((int)threadIdx.x) & 3)];"


def replaced(old: str, new: str, first_of: int = 1) -> Callable[[str], str]:
    """An edit of the source: `old`, of which there must be `first_of`, becomes `new`."""

    def edit(source: str) -> str:
        assert source.count(old) == first_of, f"{old!r} is there {source.count(old)} times"
        return source.replace(old, new, 1)

    return edit


def broken_mirror(old: str, new: str, blocks: int = 2, **settings: Any) -> Any:
    """The report of a `mirror` in which a statement is another one."""
    kernel = kernels.built_with("sm_80", kernels.mirror(blocks), edit=replaced(old, new))
    return kernel(kernels.tensor(128 * blocks), kernels.unwritten(128 * blocks), **settings)


def broken_product(arch: str, edit: Callable[[str], str], **settings: Any) -> Any:
    """The report of a product of 128 x 64 x 128, staged through shared memory, with its source edited."""
    kernel = kernels.built_with(arch, kernels.gemm(128, 64, 128, out="float16", staged=True), edit=edit)
    A, B = kernels.tensor(128, 128, dtype=torch.float16), kernels.tensor(128, 64, dtype=torch.float16)
    return kernel(A, B, kernels.unwritten(128, 64, dtype=torch.float16), **settings)


def kinds(report: Any) -> set[str]:
    return {finding.kind for finding in report.findings}


def test_the_mirror_itself_is_clean():
    kernel = kernels.built("sm_80", kernels.mirror, 2)
    X, Y = kernels.tensor(256), kernels.unwritten(256)
    for settings in kernels.SCHEDULES:
        kernel(X, Y, **settings).assert_clean()
        assert torch.equal(Y.view(2, 128), X.view(2, 128).flip(1))
    assert [kernel.source.count(line) for line in (FILL, SYNC, TURN, STORE)] == [1, 1, 1, 1]


# ---- races


@pytest.mark.parametrize("settings", kernels.SCHEDULES, ids=lambda s: f"{s['async_mode']}-{s['order']}")
def test_missing_barrier(settings: dict[str, Any]):
    """In every order; where the reader comes first, its numbers are not even initialised."""
    report = broken_mirror(SYNC, "", **settings)
    assert kinds(report) <= {"race", "uninitialised"}
    finding = next(f for f in report.findings if f.kind == "race")
    assert {finding.place.text, finding.other_place.text} == {FILL, TURN}
    assert finding.thread + finding.other_thread == 127
    assert finding.block == finding.other_block


def test_a_finding_is_shown_once_with_its_count():
    report = broken_mirror(SYNC, "")
    races = [f for f in report.findings if f.kind == "race"]
    assert len(races) <= 2  # the reader after the writer, the writer after the reader
    assert sum(f.count for f in races) >= 128
    assert not report.clean
    with pytest.raises(AssertionError, match="race"):
        report.assert_clean()
    assert TURN in str(report)


def test_missing_syncwarp():
    """Within a warp too: lanes need not run in step."""
    report = broken_mirror(TURN, TURN.replace("127 - ((int)threadIdx.x)", "((int)threadIdx.x) ^ 1"))
    report.assert_clean()
    edit = replaced(SYNC, "")
    swap = replaced(TURN, TURN.replace("127 - ((int)threadIdx.x)", "((int)threadIdx.x) ^ 1"))
    kernel = kernels.built_with("sm_80", kernels.mirror(1), edit=lambda source: swap(edit(source)))
    assert "race" in kinds(kernel(kernels.tensor(128), kernels.unwritten(128)))
    warp = replaced(SYNC, "__syncwarp();")
    kernel = kernels.built_with("sm_80", kernels.mirror(1), edit=lambda source: swap(warp(source)))
    kernel(kernels.tensor(128), kernels.unwritten(128)).assert_clean()


def test_two_threads_of_a_block_write_one_element():
    report = broken_mirror(STORE, STORE.replace("* 128) + ((int)threadIdx.x)", "* 128) + (((int)threadIdx.x) & 63)"))
    (finding,) = report.findings
    assert finding.kind == "race"
    assert abs(finding.thread - finding.other_thread) == 64
    assert finding.block == finding.other_block
    assert "Y" in finding.message


def test_two_blocks_write_one_element():
    report = broken_mirror(STORE, STORE.replace("((int)blockIdx.x) * 128", "((int)blockIdx.x) * 64"))
    (finding,) = report.findings
    assert finding.kind == "race"
    assert finding.block != finding.other_block
    assert "Y" in finding.message


def test_a_block_reads_what_another_one_writes():
    other = "Y[(128 - (((int)blockIdx.x) * 128) + ((int)threadIdx.x))]"
    report = broken_mirror(STORE, f"{STORE} {SYNC} x[((int)threadIdx.x)] = {other};")
    assert kinds(report) == {"race"}
    assert report.findings[0].block != report.findings[0].other_block


# ---- memory


def test_uninitialised():
    report = broken_mirror(FILL, f"if (threadIdx.x != 5) {FILL}")
    (finding,) = report.findings
    assert finding.kind == "uninitialised"
    assert finding.thread == 122
    assert finding.place.text == TURN
    assert finding.count == 2  # blocks


@pytest.mark.parametrize("index", ["(128 + ((int)threadIdx.x))", "(-1 - ((int)threadIdx.x))", "(1 << 20)"])
def test_beyond_shared_memory(index: str):
    report = broken_mirror(TURN, TURN.replace("(127 - ((int)threadIdx.x))", index))
    finding = next(f for f in report.findings if f.kind == "out_of_bounds")
    assert "shared" in finding.message
    assert finding.place.text.startswith("y[")


@pytest.mark.parametrize("offset", [-1, 1, 1 << 20])
@pytest.mark.parametrize(("statement", "name"), [(FILL, "X"), (STORE, "Y")])
def test_beyond_a_tensor(statement: str, name: str, offset: int):
    start = f"{name}[((((int)blockIdx.x) * 128)"
    report = broken_mirror(statement, statement.replace(start, f"{start} + ({offset})"))
    bounds = [f for f in report.findings if f.kind == "out_of_bounds"]
    assert bounds and bounds[0].place.text.count(f"({offset})") == 1
    if abs(offset) == 1:
        assert name in bounds[0].message
        assert bounds[0].thread == (0 if offset < 0 else 127)


@pytest.mark.parametrize("statement", [TURN, STORE])
def test_beyond_a_local_array(statement: str):
    report = broken_mirror(statement, statement.replace("((int)threadIdx.x) & 3", "((int)threadIdx.x) & 7"))
    assert "out_of_bounds" in kinds(report)
    finding = next(f for f in report.findings if f.kind == "out_of_bounds")
    assert finding.thread % 8 >= 4


def test_a_write_to_what_the_kernel_declares_const():
    report = broken_mirror(STORE, f"{STORE} const_cast<float*>(X)[threadIdx.x + blockIdx.x * 128] = 0.0f;")
    (finding,) = report.findings
    assert finding.kind == "read_only"
    assert "X" in finding.message


def test_a_write_to_what_the_caller_declares_read_only():
    kernel = kernels.built("sm_80", kernels.mirror, 2)
    Y = kernels.unwritten(256)
    report = kernel(kernels.tensor(256), Y, readonly=["X", "Y"])
    assert kinds(report) == {"read_only"}
    assert Y.isnan().all()


def test_more_shared_memory_than_the_architecture_has():
    """200 000 bytes: sm_90a has 227 KiB a block, sm_80 163."""
    X, Y = kernels.tensor(128), kernels.unwritten(128)
    kernels.built("sm_90a", kernels.large, 50_000)(X, Y).assert_clean()
    assert torch.equal(X, Y)
    report = kernels.built("sm_80", kernels.large, 50_000)(X, Y)
    (finding,) = report.findings
    assert finding.kind == "misuse"
    assert "200000" in finding.message and str(163 * 1024) in finding.message
    assert report.blocks == 0


# ---- barriers and collectives


@pytest.mark.parametrize("after", ["", SYNC])
def test_a_barrier_that_half_the_block_passes_by(after: str):
    """The other half comes to the next barrier instead, or to the end of the kernel."""
    report = broken_mirror(SYNC, f"if (threadIdx.x < 64) {SYNC} {after}")
    assert "barrier" in kinds(report)
    assert kinds(report) == {"barrier"} if after else kinds(report) > {"race"}


def test_a_collective_without_one_lane():
    exchange = "y[0] += __shfl_xor_sync(0xffffffffu, y[1], 1, 32);"
    report = broken_mirror(STORE, f"if ((threadIdx.x & 31) != 5) {exchange} {STORE}")
    finding = next(f for f in report.findings if f.kind == "divergence")
    assert exchange in finding.place.text
    assert finding.other_thread % 32 == 5


def test_lanes_in_two_collectives():
    report = broken_mirror(
        SYNC,
        "if (threadIdx.x & 1) __syncwarp(); else x[0] += __shfl_xor_sync(0xffffffffu, 0.0f, 1, 32); __syncthreads();",
    )
    assert "divergence" in kinds(report)


def test_deadlock_names_who_waits_where():
    """The barrier before the store expects twice the threads there are."""
    old, new = "tl::__sync_thread_partial(3, 128);", "tl::__sync_thread_partial(3, 256);"
    report = broken_product("sm_90a", lambda source: source.replace(old, new))
    assert "deadlock" in kinds(report)
    assert report.stopped
    wait = next(w for w in report.waits if "128 of 256" in w.waits_in)
    assert wait.place.text == new
    assert wait.threads == "128-255"
    assert "128-255" in str(report)


def test_deadlock_on_an_mbarrier():
    """The barrier that frees a buffer wants one arrival more than there are threads: the loader never loads again."""
    report = broken_product("sm_90a", lambda source: re.sub(r"\.init\(128\)", ".init(129)", source))
    assert "deadlock" in kinds(report)
    assert any(".wait(" in wait.place.text for wait in report.waits)


def test_an_endless_loop_is_ended():
    report = broken_mirror(SYNC, "while (true) __syncthreads();", max_seconds=0.3)
    assert report.stopped
    (finding,) = report.findings
    assert finding.kind == "timeout"
    assert "longer than 0.3 s" in finding.message
    assert finding.place.text.startswith("while (true)")
    assert report.seconds < 5


# ---- what a GPU faults on, or answers with garbage


@pytest.mark.parametrize(
    ("statement", "where"),
    [
        ("*(float4*)(Y) = *(float4*)(x + 5);", "shared+0x14"),
        ("*(float4*)(x + 5) = *(float4*)(y);", "shared+0x14"),
        ("*(float2*)(Y) = *(float2*)(X + 3);", "byte 12 of X"),
        ("*(float2*)(Y + 3) = *(float2*)(y);", "byte 12 of Y"),
    ],
)
def test_misaligned_vectors(statement: str, where: str):
    report = broken_mirror(SYNC, f"{SYNC} if (threadIdx.x == 0) {{ {statement} }}", blocks=1)
    finding = next(f for f in report.findings if f.kind == "misuse")
    assert where in finding.message
    assert finding.thread == 0
    assert report.stopped


def test_division_by_zero():
    report = broken_mirror(STORE, f"{STORE} Y[blockIdx.x * 128 + threadIdx.x] = 5 / (int)threadIdx.x;")
    (finding,) = report.findings
    assert (finding.kind, finding.thread) == ("misuse", 0)
    assert "division by zero" in finding.message


@pytest.mark.parametrize("operation", ["/", "%"])
def test_division_out_of_range(operation: str):
    """INT_MIN / -1: a GPU goes on with some number, an x86 CPU faults."""
    divide = f"Y[0] = ((int)0x80000000 + (int)(0 * X[0])) {operation} (int)(X[0] * 0 - 1);"
    report = broken_mirror(STORE, f"{STORE} if (threadIdx.x == 0) {{ {divide} }}")
    assert kinds(report) == {"misuse"}
    assert divide in report.findings[0].place.text


def test_a_fault_ends_the_launch_and_not_the_process():
    edit = replaced(STORE, f"{STORE} Y[0] = 5 / (int)threadIdx.x;")
    faulty = kernels.built_with("sm_80", kernels.mirror(2), edit=edit)
    clean = kernels.built("sm_80", kernels.mirror, 2)
    for _ in range(3):
        X, Y = kernels.tensor(256), kernels.unwritten(256)
        assert faulty(X, kernels.unwritten(256)).stopped
        clean(X, Y).assert_clean()
        assert torch.equal(Y.view(2, 128), X.view(2, 128).flip(1))


def test_local_arrays_that_do_not_fit():
    big = "float big[200000]; for (int i = 199999; i >= 0; i--) big[i] = X[0]; Y[0] = big[(int)X[1] & 7];"
    report = broken_mirror(STORE, f"{STORE} if (threadIdx.x == 0) {{ {big} }}")
    assert report.stopped and not report.clean


# ---- atomics: they do not race with each other, and do with all else, in whatever order they come


@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled", "greedy-descending"])
@pytest.mark.parametrize(
    "statement",
    [
        # block 1 adds too before it reads
        "if (threadIdx.x == 0) { atomicAdd(&Y[0], 1.0f); if (blockIdx.x == 1) Y[128] = Y[0]; }",
        # so does thread 1, in shared memory
        "__syncthreads(); if (threadIdx.x < 2) atomicAdd(&x[0], 1.0f); if (threadIdx.x == 1) Y[1] = x[0];",
        "__syncthreads(); if (threadIdx.x < 2) atomicAdd(&x[0], 1.0f); if (threadIdx.x == 1) x[0] = 3.0f;",
    ],
)
def test_a_plain_access_after_somebody_elses_atomic(statement: str, order: str):
    report = broken_mirror(STORE, f"{statement}", order=order)
    assert "race" in kinds(report)


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize(
    "statement",
    [
        "if (threadIdx.x == 0) AtomicLoad(&Y[0], 0); else AtomicAdd(&Y[0], 1.0f, 0);",
        "__syncthreads(); if (threadIdx.x & 1) AtomicAdd(&x[0], 1.0f, 0); else AtomicLoad(&x[0], 0);",
    ],
)
def test_atomics_beside_atomics_are_clean(statement: str, order: str):
    assert not broken_mirror(STORE, statement, order=order).findings


@pytest.mark.parametrize("order", ["ascending", "descending", "greedy"])
def test_threads_that_exit_before_a_barrier(order: str):
    report = broken_mirror(FILL, f"if (threadIdx.x >= 64) return; {FILL}", order=order)
    assert "barrier" in kinds(report)


def test_many_readers_in_many_blocks_are_quick():
    """Every thread of 64 blocks reads the same 128 numbers of a tensor that the kernel writes elsewhere."""
    read_all = "float sum = 0.0f; for (int i = 0; i < 128; i++) sum += Y[i]; if (sum == 1e30f) Y[200] = sum;"
    report = broken_mirror(STORE, read_all, blocks=64)
    assert report.clean
    assert report.seconds < 5


# ---- asynchronous copies


@pytest.mark.parametrize("settings", kernels.SCHEDULES, ids=lambda s: f"{s['async_mode']}-{s['order']}")
def test_cp_async_without_its_wait(settings: dict[str, Any]):
    report = broken_product("sm_80", replaced("tl::cp_async_wait<0>();", ""), **settings)
    assert "in_flight" in kinds(report)
    finding = next(f for f in report.findings if f.kind == "in_flight")
    assert "ldmatrix" in finding.place.text + finding.other_place.text


@pytest.mark.parametrize("settings", kernels.SCHEDULES, ids=lambda s: f"{s['async_mode']}-{s['order']}")
def test_the_source_of_a_copy_changes_before_its_wait(settings: dict[str, Any]):
    copy = (
        "Y[threadIdx.x] = 1.0f; __syncthreads(); if (threadIdx.x < 32) { "
        "tl::cp_async_gs<16>(x + 4 * threadIdx.x, Y + 4 * threadIdx.x); tl::cp_async_commit(); } __syncthreads(); "
        "{0} __syncthreads(); if (threadIdx.x < 32) tl::cp_async_wait<0>(); __syncthreads();"
    )
    assert broken_mirror(SYNC, copy.replace("{0}", ""), blocks=1, **settings).clean
    report = broken_mirror(SYNC, copy.replace("{0}", "Y[threadIdx.x] = 7.0f;"), blocks=1, **settings)
    assert kinds(report) == {"in_flight"}


@pytest.mark.parametrize("settings", kernels.SCHEDULES, ids=lambda s: f"{s['async_mode']}-{s['order']}")
@pytest.mark.parametrize("wait", ["", "tl::tma_store_wait<0, true>();"])
def test_what_a_tma_store_writes_is_read_back_too_early(wait: str, settings: dict[str, Any]):
    """Even after .read: that waits for the source alone."""
    store = re.compile(r"tl::tma_store_wait<0.*>\(\);")

    def edit(source: str) -> str:
        assert len(store.findall(source)) == 1
        early = f"{wait} if (C[0] == half_t(1e4f)) ((half_t*)a)[0] = C[1]; tl::tma_store_wait<0, false>();"
        return store.sub(early, source)

    assert "in_flight" in kinds(broken_product("sm_90a", edit, **settings))


def test_misaligned_cp_async():
    """The second element of A: 2 bytes past a multiple of 16."""
    report = broken_product("sm_80", lambda source: source.replace("(&(A[", "(&(A[1 + ", 1))
    assert "misuse" in kinds(report)
    assert any("byte 2 of A" in f.message for f in report.findings if f.kind == "misuse")


def test_missing_proxy_fence():
    """What threads wrote is not visible to a TMA store without one."""
    report = broken_product("sm_90a", replaced("tl::fence_proxy_async();", ""))
    (finding,) = report.findings
    assert finding.kind == "proxy"
    assert "tma_store" in finding.place.text
    assert "stmatrix" in finding.other_place.text


def test_missing_fence_after_mbarrier_init():
    report = broken_product("sm_90a", replaced("tl::fence_barrier_init();", ""))
    assert kinds(report) == {"proxy"}
    assert all(".init(" in f.other_place.text for f in report.findings)


def test_a_bulk_store_that_nobody_waits_for():
    """The block may end, and its shared memory go to another one, before the store has read it."""
    report = broken_product("sm_90a", replaced("tl::tma_store_wait<0, true>();", ""))
    assert kinds(report) == {"leak"}


def test_wgmma_without_its_wait():
    """The accumulators are not there yet when they are converted and stored."""
    report = broken_product("sm_90a", replaced("tl::warpgroup_wait<0>();", ""))
    assert kinds(report) == {"in_flight", "leak"}
    assert "stmatrix" in next(f for f in report.findings if f.kind == "in_flight").place.text


def test_wgmma_without_its_fence():
    report = broken_product("sm_90a", replaced("tl::warpgroup_arrive();", ""))
    assert kinds(report) == {"misuse"}


@pytest.mark.parametrize("settings", kernels.SCHEDULES, ids=lambda s: f"{s['async_mode']}-{s['order']}")
def test_tma_load_without_a_wait(settings: dict[str, Any]):
    report = broken_product("sm_90a", replaced("mbarrier[(k_1 & 1)].wait((k_1 >> 1));", ""), **settings)
    assert kinds(report) & {"race", "in_flight", "uninitialised"}


def test_a_buffer_that_is_freed_too_early():
    """The loader does not wait until a tile has been used, and loads the next one over it."""
    wait = "mbarrier[((k & 1) + 2)].wait(((k >> 1) ^ 1));"
    report = broken_product("sm_90a", replaced(wait, ""))
    assert kinds(report) & {"race", "in_flight"}


def test_tma_brings_more_than_was_announced():
    old, new = "mbarrier[(k & 1)].arrive_and_expect_tx(4096);", "mbarrier[(k & 1)].arrive_and_expect_tx(2048);"
    report = broken_product("sm_90a", replaced(old, new))
    assert kinds(report) == {"barrier"}
    assert "2048" in report.findings[0].message


# ---- results


def test_results_that_depend_on_the_schedule():
    """The rank of a number within its bin is a matter of who comes first."""
    kernel = kernels.built("sm_80", kernels.atomic_histogram, 512, 8, "float32")
    X, which = kernels.tensor(512), torch.randint(0, 8, (512,), dtype=torch.int32)
    zero, count = torch.zeros(8), torch.zeros(8, dtype=torch.int32)
    report = kernel.check(X, which, zero, zero.clone(), zero.clone(), count, kernels.unwritten(512, dtype=torch.int32))
    assert kinds(report) == {"schedule"}
    assert {f.message.split()[0] for f in report.findings} == {"rank"}
