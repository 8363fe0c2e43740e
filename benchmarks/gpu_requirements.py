"""A section of benchmarks.gpu_check: the rows of the project's requirements that only a GPU can answer.

Each function here lists the checks of one requirement, by its id (R07, R14, ...): what went wrong for other packages,
made again with ours. tests/test_gpu_check.py runs the same functions, and those that need no GPU on the CPU.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autotune import static_check, target, verify
from autotune.store import Entry
from benchmarks import gpu_cases
from benchmarks.gpu_cases import check_backward, check_outputs, check_served, state_argument
from benchmarks.gpu_rows import Check, Found, NotRun, Session, WrongResult
from linattn_tl import UnsupportedError, arrays, linear_attention, packaging, preload, registry
from linattn_tl.ops.linear_attention.definition import Options, TorchRunner, recurrent
from tests import conformance
from tests.conformance import Case, Subject, Tensors

ROOT = Path(__file__).parents[1]
DTYPE = "bfloat16"
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 100, 112, 128, 160, 192, 224, 256)
QUICK_HEAD_DIMS = (16, 100)
REPEATS, QUICK_REPEATS = 20, 2
SLEEP_CYCLES = 10**8  # of the device's clock: some 60 ms in which a stream is busy
SLOTS = (3, 5, -1, -1, 7, 0, -1, -1)  # captured
OTHER_SLOTS = ((9, -1, 1, 2, -1, -1, -1, 4), (-1, -1, -1, -1, -1, -1, -1, 6), SLOTS)  # replayed
CHILD_TIMEOUT_S = 45


def requirement_checks(session: Session) -> list[Check]:
    """All of them on a GPU; on the CPU those that need none."""
    return [check for group in groups(session) for check in GROUPS[group](session)]


def groups(session: Session) -> list[str]:
    return [name for name in GROUPS if session.cuda or name in WITHOUT_GPU]


def sequence_subjects(session: Session) -> list[Subject]:
    return [s for s in gpu_cases.subjects(session) if s.differentiable]


def decode_subjects(session: Session) -> list[Subject]:
    return [s for s in gpu_cases.subjects(session) if not s.differentiable]


def usual_dims(session: Session, op: str, dtype: str = DTYPE) -> tuple[int, int]:
    return gpu_cases.dims_to_try(session, op, dtype)[0]


# ---- R07: offsets beyond 32 bits


def large_index(session: Session) -> list[Check]:
    """(a) a token tensor whose batch stride is beyond 2^31 elements; (b) more than 2^31 elements, on a large GPU."""
    if session.quick:
        return []
    views = [
        Check(f"R07 {s.op}, batch stride above 2^31", partial(far_view, s, session)) for s in sequence_subjects(session)
    ]
    large = [Check("R07 linear_attention, more than 2^31 elements", partial(large_tensors, session))]
    return views + (large if session.cuda else [])


def far_view(subject: Subject, session: Session) -> Found:
    """v in one buffer of 4.3 GB, most of it never touched, gives what its contiguous copy gives."""
    K, V = usual_dims(session, subject.op)
    case = Case("R07", T=64, K=K, V=V, dtype=DTYPE, final=True)
    stride = 2**31 + 64
    _need_bytes(session.device, 2 * stride + 2**30)
    buffer = torch.empty(stride + 64 * case.HV * V, dtype=torch.bfloat16, device=session.device)
    moved = _detached(gpu_cases.on_device(subject, case, session.device)[1])
    far = buffer.as_strided(moved["v"].shape, (stride, case.HV * V, V, 1)).copy_(moved["v"])
    near_results, far_results = (
        _with_gradients(subject, case, {**moved, "v": v}, session.backend) for v in (moved["v"], far)
    )
    for name, x in far_results.items():
        verify.check_close(name, x, near_results[name].double(), dtype=DTYPE)
    return Found(f"v spans {2 * stride / 1e9:.1f} GB")


BATCH, TOKENS, HEADS, WIDTH, BLOCK = 2, 524352, 16, 128, 128  # the last 128 tokens lie beyond 2^31 elements


def large_tensors(session: Session) -> Found:
    """The last tokens of the second sequence, alone beyond 2^31 elements, against the definition in float64.

    The keys of the second sequence are zero but for its first 128 tokens and its last 256, and the feature map is the
    identity: so its last outputs depend on 384 tokens, which the definition can walk. The first sequence is all noise:
    an offset that wraps around reads it. Gradients likewise, where memory allows.
    """
    elements = BATCH * TOKENS * HEADS * WIDTH
    _need_bytes(session.device, 2 * elements * 5)
    grad = torch.cuda.mem_get_info(session.device)[0] > 2 * elements * 14
    shape = (BATCH, TOKENS, HEADS, WIDTH)
    generator = torch.Generator(session.device).manual_seed(0)
    q, k, v = (
        torch.randn(shape, dtype=torch.bfloat16, device=session.device, generator=generator).requires_grad_(grad)
        for _ in "qkv"
    )
    with torch.no_grad():
        k[1, BLOCK : -2 * BLOCK] = 0
    form: dict[str, Any] = {"feature_map": "identity", "normalize": False, "scale": WIDTH**-0.5}
    o, _ = linear_attention(q, k, v, backend=session.backend, **form)
    exact = [_that_count(x).cpu().double().requires_grad_() for x in (q, k, v)]
    want = TorchRunner(recurrent).forward((*exact, None, None), None, Options(**form))[0][0]
    errors = {"o": _far_error("o", o[1:, -BLOCK:].detach(), want[:, -BLOCK:].detach())}
    if grad:
        upstream = torch.zeros_like(o)
        upstream[1:, -BLOCK:] = torch.randn(upstream[1:, -BLOCK:].shape, device=session.device).bfloat16()
        truth = torch.autograd.grad(want[:, -BLOCK:], exact, upstream[1:, -BLOCK:].cpu().double())
        found = torch.autograd.grad(o, (q, k, v), upstream)
        for name, got, right in zip(("dq", "dk", "dv"), found, truth, strict=True):
            errors[name] = _far_error(name, _that_count(got), right)
    what = "o, dq, dk, dv" if grad else "o; too little memory for the gradients"
    return Found(f"{elements / 2**31:.4f} x 2^31 elements: {what}", {"relative_rms": errors})


def _that_count(x: torch.Tensor) -> torch.Tensor:
    """Of the second sequence, the first 128 tokens and the last 256."""
    return torch.cat([x[1:, :BLOCK], x[1:, -2 * BLOCK :]], 1).detach()


def _far_error(name: str, got: torch.Tensor, want: torch.Tensor) -> float:
    return verify.check_close(name, got.cpu(), want, dtype=DTYPE)


def _need_bytes(device: torch.device, count: int) -> None:
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    if free < count:
        raise NotRun(f"needs {count / 1e9:.0f} GB of GPU memory; {free / 1e9:.0f} GB are free")


# ---- R09: head dims


def head_dims(session: Session) -> list[Check]:
    """Each pair (K, V) is right, forward and backward, or is refused in words that say what is missing."""
    dims = QUICK_HEAD_DIMS if session.quick else HEAD_DIMS
    subjects = gpu_cases.subjects(session)
    sweep = [
        Check(f"R09 {s.op} K={K}, each V", partial(one_head_dim, s, K, dims, session)) for s in subjects for K in dims
    ]
    return sweep + [Check(f"R09 {s.op}, a fallback is recorded", partial(fallback, s, session)) for s in subjects]


def one_head_dim(subject: Subject, K: int, dims: Sequence[int], session: Session) -> Found:
    right, refused = [], {}
    for V in dims:
        case = _small_case(subject, K, V)
        try:
            _check(subject)(subject, case, session.device, session.backend)
        except UnsupportedError as why:
            refused[V] = str(why)
        else:
            right.append(V)
    for V, why in refused.items():
        if subject.op not in why or session.backend not in why:
            raise WrongResult(f"K={K} V={V} is refused without a word of what is missing: {why}")
    said = f"; {len(refused)} refused: {next(iter(refused.values()))}" if refused else ""
    return Found(f"{len(right)} right{said}", {"right": right, "refused": list(refused)})


def fallback(subject: Subject, session: Session) -> Found:
    """Head dims that no kernel has are served by another backend, which is said and counted."""
    case = replace(_small_case(subject, 300, 20), dtype="float32")
    registry.forget_choices()
    before = registry.stats()["fallback"]
    _check(subject)(subject, case, session.device, "auto")
    served = registry.last_backend(subject.op)
    if served in registry.COMPILED or registry.stats()["fallback"] == before:
        raise WrongResult(f"{served} served K=300, and no fallback was counted")
    return Found(f"{served} serves K=300")


def _small_case(subject: Subject, K: int, V: int) -> Case:
    sizes: dict[str, Any] = {"T": 34, "state": True, "final": True} if subject.differentiable else {"T": 2}
    return Case(f"R09-{K}-{V}", B=1, H=1, HV=1, K=K, V=V, dtype=DTYPE, **sizes)


def _check(subject: Subject) -> Callable[..., Found]:
    return check_backward if subject.differentiable else gpu_cases.check_forward


# ---- R10: shared memory


def shared_memory(session: Session) -> list[Check]:
    """Each stored binary's kernels fit the shared memory that a block may opt in to on this device."""
    return [Check("R10 shared memory of every binary", partial(shared_memory_fits, session))]


def shared_memory_fits(session: Session) -> Found:
    found = gpu_cases.entries(session.device)
    properties = torch.cuda.get_device_properties(session.device)
    limits = [getattr(properties, "shared_memory_per_block_optin", 0)]
    limits += [target.SHARED_LIMIT[arch] for arch in gpu_cases.runnable_archs(session.device)]
    limit = next(bytes for bytes in limits if bytes)
    used = {entry.key: shared_bytes(entry) for entry in found}
    over = [e for e in found if used[e.key] > limit]
    if over:
        first = over[0].manifest
        raise WrongResult(
            f"{len(over)} binaries need more than the device's {limit} bytes, such as {first['kernel']} "
            f"{first['dtype']} {first['config']}: {used[over[0].key]}"
        )
    return Found(f"{len(found)} binaries, at most {max(used.values(), default=0)} of {limit} bytes")


def shared_bytes(entry: Entry) -> int:
    """The most that one of its functions takes, dynamic and static."""
    return max(f["smem_bytes"] + f["static_smem_bytes"] for f in entry.manifest["functions"].values())


# ---- R19: symbols


def symbols(session: Session) -> list[Check]:
    """Each stored binary is whole and needs the C library alone: nothing of a torch or a Python of its own."""
    return [Check("R19 every binary needs libc alone", partial(needs_libc_alone, session))]


def needs_libc_alone(session: Session) -> Found:
    stored = packaging.take_inventory(gpu_cases.runnable_archs(session.device), lambda *progress: None).stored
    found = [x.entry for x in stored if x.state == "served"]  # others are of sources that have changed since
    for entry in found:
        complaints = static_check.check_usable(entry.manifest, entry.path.read_bytes())
        if complaints:
            said = entry.manifest
            raise WrongResult(f"{said['kernel']} {said['dtype']} {said['arch']} {said['config']}: {complaints[0]}")
    return Found(f"{len(found)} binaries")


# ---- R13: streams


def side_stream(session: Session) -> list[Check]:
    """On a stream of its own, behind work that is still running: a kernel on another stream would read zeros."""
    return [
        Check(f"R13 {s.op}, {backend}, behind a busy stream", partial(behind_busy_stream, s, backend, session))
        for s in gpu_cases.subjects(session)
        for backend in (session.backend, arrays.BACKEND)
    ]


def behind_busy_stream(subject: Subject, backend: str, session: Session) -> Found:
    if backend == arrays.BACKEND and (why := arrays.missing()):
        raise NotRun(why)
    case, repeats = _stream_case(subject, session), QUICK_REPEATS if session.quick else REPEATS
    ready = _detached(gpu_cases.on_device(subject, case, session.device)[1])
    # the first call loads the kernels; what it waits for must not be waited for behind the busy stream
    upstream = _upstream(subject, case, gpu_cases.call(subject, case, ready, backend))
    stream = torch.cuda.Stream(session.device)
    for i in range(repeats):
        late = {name: torch.zeros_like(x) for name, x in ready.items()}
        stream.wait_stream(torch.cuda.current_stream(session.device))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            for name, x in late.items():
                x.copy_(ready[name])
            results = _with_gradients(subject, case, late, backend, upstream)
            seen = {name: x.clone() for name, x in results.items()}
        stream.synchronize()
        check_served(subject.op, backend)
        try:
            _check_results(subject, case, seen)
        except (verify.VerificationError, WrongResult) as error:
            raise WrongResult(f"repeat {i + 1} of {repeats}: {error}") from None
    return Found(f"{repeats}/{repeats} right")


def _stream_case(subject: Subject, session: Session) -> Case:
    K, V = usual_dims(session, subject.op)
    if subject.differentiable:
        return Case("R13", T=200, K=K, V=V, dtype=DTYPE, state=True, final=True)
    return Case("R13", B=4, T=2, K=K, V=V, dtype=DTYPE)


# ---- R14: CUDA graphs


def graphs(session: Session) -> list[Check]:
    """Captured after preload, replayed with other contents; and what a capture without preload says."""
    return [
        *(
            Check(f"R14 {s.op}, captured with slots", partial(captured_decode, s, session))
            for s in decode_subjects(session)
        ),
        *(Check(f"R14 {s.op}, captured", partial(captured_forward, s, session)) for s in sequence_subjects(session)),
        *(
            Check(f"R14 {op}, captured without preload", partial(captured_cold, op, session))
            for op in ("linear_attention", "linear_attention_decode")
        ),
    ]


def _preload(op: str, case: Case, session: Session) -> None:
    served = preload(
        op.removesuffix("_decode"),
        K=case.K, V=case.V, H=case.H, HV=case.HV,
        dtypes=[getattr(torch, case.dtype)], device=session.device, backend=session.backend,
    )  # fmt: skip
    if set(served.values()) != {session.backend}:
        raise WrongResult(f"preload promises {served}; expected {session.backend} alone")


def captured_decode(subject: Subject, session: Session) -> Found:
    """Padded rows give 0 and touch nothing, real ones are right, and no other row of the pool changes a bit."""
    K, V = usual_dims(session, subject.op)
    case = Case("R14", B=len(SLOTS), T=1, HV=4, K=K, V=V, dtype=DTYPE, slots=SLOTS)
    _preload(subject.op, case, session)
    inputs = _detached(gpu_cases.on_device(subject, case, session.device)[1])
    state = {name: inputs[name].clone() for name in subject.states}
    slots, out = torch.tensor(SLOTS, device=session.device), torch.empty_like(inputs["v"])
    step = partial(
        registry.get_op(subject.op).call,
        *(inputs[name] for name in subject.tokens),
        state_argument(subject, state),
        slots=slots,
        out=out,
        backend=session.backend,
    )
    graph = _captured(step)
    check_served(subject.op, session.backend)
    for picked in OTHER_SLOTS:
        for name, x in state.items():
            x.copy_(inputs[name])
        slots.copy_(torch.tensor(picked))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize(session.device)
        replayed = replace(case, slots=picked)
        padded = [i for i, slot in enumerate(picked) if slot < 0]
        if out[padded].ne(0).any():
            raise WrongResult(f"slots {picked}: the o of a padded row is not 0")
        gpu_cases.check_untouched(subject, replayed, inputs, state)
        check_outputs(subject, replayed, {"o": out, **state})
    return Found(f"{len(OTHER_SLOTS)} replays")


def captured_forward(subject: Subject, session: Session) -> Found:
    """Replayed over new contents it gives the bits of a call that is not captured."""
    K, V = usual_dims(session, subject.op)
    case = Case("R14", T=200, HV=4, K=K, V=V, dtype=DTYPE, state=True, final=True)
    _preload(subject.op, case, session)
    first = _detached(gpu_cases.on_device(subject, case, session.device)[1])
    inputs = {name: x.clone() for name, x in first.items()}
    results: Tensors = {}
    with torch.no_grad():
        graph = _captured(lambda: results.update(gpu_cases.call(subject, case, inputs, session.backend)))
        check_served(subject.op, session.backend)
        for change in (1.0, -0.5):
            for name, x in inputs.items():
                x.copy_(first[name] * change if name in subject.tokens else first[name])
            graph.replay()
            torch.cuda.synchronize(session.device)
            for name, want in gpu_cases.call(subject, case, inputs, session.backend).items():
                _same_bits(f"replayed {name}", results[name], want)
    return Found("2 replays, the bits of a plain call")


def _captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


# A process that has loaded nothing: what it says of a capture, and whether the op works afterwards.
COLD = """
import json, sys, torch
from linattn_tl import linear_attention, linear_attention_decode
op, K, V, device, backend = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
torch.manual_seed(0)
q, k = (torch.randn(2, 2, 2, K) for _ in "qk")
tensors = [q, k, torch.randn(2, 2, 2, V), torch.rand(4, 2, K, V), torch.rand(4, 2, K)]

def call(tensors, backend):
    q, k, v, kv, z = tensors
    if op == "linear_attention":
        return linear_attention(q, k, v, backend=backend)[0]
    slots = torch.tensor([2, -1], device=q.device)
    return linear_attention_decode(q, k, v, (kv.clone(), z.clone()), slots=slots, backend=backend)

def wrong_by(o):
    return ((o.double().cpu() - want).norm() / want.norm()).item()

rounded = [x.bfloat16() for x in tensors[:3]] + tensors[3:]
want = call([x.double() for x in rounded], "torch")
inputs = [x.to(device, copy=True) for x in rounded]
slots = torch.tensor([2, -1], device=device)
torch.cuda.synchronize()
found = {"said": None, "replayed": None}
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        if op == "linear_attention":
            o = linear_attention(*inputs[:3], backend=backend)[0]
        else:
            o = linear_attention_decode(*inputs[:3], tuple(inputs[3:]), slots=slots, backend=backend)
except RuntimeError as error:
    found["said"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
else:
    inputs[3].copy_(rounded[3]), inputs[4].copy_(rounded[4])
    graph.replay()
    torch.cuda.synchronize()
    found["replayed"] = wrong_by(o)
inputs[3].copy_(rounded[3]), inputs[4].copy_(rounded[4])
found["afterwards"] = wrong_by(call(inputs, backend))
print(json.dumps(found))
"""


def captured_cold(op: str, session: Session) -> Found:
    """Right, or refused in words that name the op; never a crash, and the next call of the op works."""
    K, V = usual_dims(session, op)
    arguments = [op, str(K), str(V), str(session.device), session.backend]
    done = subprocess.run(
        [sys.executable, "-c", COLD, *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise WrongResult(f"the process ended with {done.returncode} and said: {last[:300]}")
    return judge_cold(op, json.loads(done.stdout.splitlines()[-1]))


def judge_cold(op: str, found: dict[str, Any]) -> Found:
    cap = verify.CAP[DTYPE]
    for when in ("replayed", "afterwards"):
        if found[when] is not None and not found[when] <= cap:
            raise WrongResult(f"{when}, o is wrong by {found[when]:.1e}")
    if found["said"] is None:
        return Found("captured, and right", found)
    if op not in found["said"]:
        raise WrongResult(f"the refusal does not name the op: {found['said']}")
    return Found(f"refused: {found['said']}", found)


# ---- R18: determinism


def determinism(session: Session) -> list[Check]:
    """Repeats with the same inputs give the same bits, outputs and gradients."""
    return [
        Check(f"R18 {s.op} {dtype}, repeats", partial(repeats, s, dtype, session))
        for s in sequence_subjects(session)
        for dtype in ("float32", DTYPE)
    ]


def repeats(subject: Subject, dtype: str, session: Session) -> Found:
    count, T, D = (QUICK_REPEATS, 256, 32) if session.quick and not session.cuda else (REPEATS, 1024, 128)
    case = Case("R18", B=1, T=T, H=8, HV=8, K=D, V=D, dtype=dtype, final=True)
    tensors = _detached(gpu_cases.on_device(subject, case, session.device)[1])
    first: Tensors = {}
    for i in range(count):
        found = _with_gradients(subject, case, tensors, session.backend)
        first = first or found
        for name, x in found.items():
            _same_bits(f"{name} of repeat {i + 1}", x, first[name])
    return Found(f"{count} repeats of T={T} H=8 D={D}")


def _same_bits(name: str, x: torch.Tensor, want: torch.Tensor) -> None:
    if not torch.equal(x, want):
        different = int((x != want).sum())
        raise WrongResult(f"{name} has other bits in {different} of {x.numel()} places")


# ---- R+2: devices


def devices(session: Session) -> list[Check]:
    """On the last GPU while the first is current, where there are several; what is mixed is refused."""
    return [
        *(Check(f"R+2 {s.op}, the device of q", partial(own_device, s, session)) for s in gpu_cases.subjects(session)),
        Check("R+2 linear_attention, mixed devices", partial(mixed_devices, session)),
    ]


def own_device(subject: Subject, session: Session) -> Found:
    current = torch.cuda.current_device()
    others = [i for i in range(torch.cuda.device_count()) if i != current]
    capability = torch.cuda.get_device_capability(session.device)
    same = [i for i in others if torch.cuda.get_device_capability(i) == capability]
    device = torch.device("cuda", same[-1]) if same else session.device
    case = _stream_case(subject, session)
    tensors = _detached(gpu_cases.on_device(subject, case, device)[1])
    results = _with_gradients(subject, case, tensors, session.backend)
    if torch.cuda.current_device() != current:
        raise WrongResult(f"the current device was {current} and is {torch.cuda.current_device()}")
    for name, x in results.items():
        if x.device != device:
            raise WrongResult(f"{name} is on {x.device}; expected {device}")
    _check_results(subject, case, results)
    return Found(f"on {device}, with {current} current; {1 + len(others)} GPU{'s' if others else ''}")


def mixed_devices(session: Session) -> Found:
    q, k, v = (torch.randn(1, 8, 2, 64, device=device) for device in (session.device, "cpu", session.device))
    try:
        linear_attention(q, k, v, backend=session.backend)
    except ValueError as why:
        return Found(f"refused: {why}")
    raise WrongResult("k on the CPU was taken with q on a GPU")


# ---- serving: no waiting for the device


def without_sync(session: Session) -> list[Check]:
    """torch's sync debug mode makes an error of what waits for the device."""
    steps = [Check(f"no sync: {s.op}", partial(decode_without_sync, s, session)) for s in decode_subjects(session)]
    both = [Check(f"no sync: {s.op}", partial(sequence_without_sync, s, session)) for s in sequence_subjects(session)]
    return steps + both


@contextmanager
def syncs_are_errors() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def decode_without_sync(subject: Subject, session: Session) -> Found:
    """With slots."""
    K, V = usual_dims(session, subject.op)
    case = Case("sync", B=4, T=1, K=K, V=V, dtype=DTYPE, slots=(3, -1, 0, -1))
    t = _detached(gpu_cases.on_device(subject, case, session.device)[1])
    slots, out = torch.tensor(case.slots, device=session.device), torch.empty_like(t["v"])
    tokens, state = [t[name] for name in subject.tokens], state_argument(subject, t)
    step = partial(registry.get_op(subject.op).call, *tokens, state, slots=slots, out=out, backend=session.backend)
    step()  # loads the kernels
    torch.cuda.synchronize(session.device)
    with syncs_are_errors():
        step()
    return Found()


def sequence_without_sync(subject: Subject, session: Session) -> Found:
    """Forward and backward, without cu_seqlens, whose values are read on the host."""
    case = _stream_case(subject, session)
    tensors = _detached(gpu_cases.on_device(subject, case, session.device)[1])
    upstream = _upstream(subject, case, gpu_cases.call(subject, case, tensors, session.backend))
    _with_gradients(subject, case, tensors, session.backend, upstream)  # loads the kernels
    torch.cuda.synchronize(session.device)
    with syncs_are_errors():
        _with_gradients(subject, case, tensors, session.backend, upstream)
    return Found()


# ---- shared by them


def _detached(tensors: Tensors) -> Tensors:
    return {name: x.detach() for name, x in tensors.items()}


def _upstream(subject: Subject, case: Case, outputs: Tensors) -> list[torch.Tensor]:
    """The case's gradient of each output, on its device."""
    found: list[Any] = [conformance.upstream_of(case, name, x, subject) for name, x in outputs.items()]
    return [g.to(x.device) for g, x in zip(found, outputs.values(), strict=True)]


def _with_gradients(
    subject: Subject, case: Case, tensors: Tensors, backend: str, upstream: Sequence[torch.Tensor] | None = None
) -> Tensors:
    """Outputs, and the gradient d<name> of every input where the op has them; upstream=None is the case's own."""
    leaves = {name: x.detach().requires_grad_(subject.differentiable) for name, x in tensors.items()}
    outputs = gpu_cases.call(subject, case, leaves, backend)
    results = {name: x.detach() for name, x in outputs.items()}
    if not subject.differentiable:
        return results
    upstream = _upstream(subject, case, outputs) if upstream is None else upstream
    found = torch.autograd.grad(list(outputs.values()), list(leaves.values()), upstream)
    return {**results, **{f"d{name}": g for name, g in zip(leaves, found, strict=True)}}


def _check_results(subject: Subject, case: Case, results: Tensors) -> None:
    """Outputs and gradients against the definition."""
    exact, plain = conformance.expected(subject.op, replace(case, backends=()))
    check_outputs(subject, case, {name: x for name, x in results.items() if name in exact.outputs})
    for name, want in exact.grads.items():
        rough = None if plain is None else plain.grads[name]
        if want is not None:
            verify.check_close(f"d{name}", results[f"d{name}"].cpu(), want, plain=rough, dtype=case.dtype)


GROUPS: dict[str, Callable[[Session], list[Check]]] = {
    "R13": side_stream,
    "R14": graphs,
    "R18": determinism,
    "no sync": without_sync,
    "R+2": devices,
    "R10": shared_memory,
    "R09": head_dims,
    "R07": large_index,
    "R19": symbols,
}
WITHOUT_GPU = ("R18", "R09", "R07", "R19")
