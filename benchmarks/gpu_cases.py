"""Two sections of benchmarks.gpu_check: each stored CUDA binary alone, and each public op, against the definition.

The ops' inputs and their truth, token by token in float64 on the CPU, are those of tests/conformance.py, so that a new
family is checked here without a word about it. Calls are the public ones; results are held to the budgets of
autotune.verify.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from autotune import build, target, verify
from autotune.launcher.cuda import CudaBinary
from autotune.store import Entry
from benchmarks.gpu_rows import Check, Found, NotRun, Session, WrongResult
from linattn_tl import loader, registry
from linattn_tl.launchers import CudaLauncher
from tests import conformance
from tests.conformance import Case, Subject, Tensors
from tl_kernels.spec import DTYPES, Kernel, Problem

USUAL_DIMS = ((64, 64), (128, 128))
MOST_DIMS = 2  # pairs of head dims that every case is run with; the others are in the sweep of requirement R09
CPU_DIMS = ((16, 24),)
LONG = 4097  # tokens: one more than whole chunks, and enough that a GPU cuts time into spans


# ---- stored binaries


@cache
def entries(device: torch.device) -> list[Entry]:
    """The stored binaries, of the user's cache and the wheel, that this device can run. Each is read whole, once."""
    archs = runnable_archs(device)
    found = {e.key: e for store in loader.stores() for e in store.entries() if e.manifest.get("arch") in archs}
    return list(found.values())


def runnable_archs(device: torch.device) -> tuple[str, ...]:
    if device.type == "cuda":
        return target.cuda_archs(*torch.cuda.get_device_capability(device))
    return tuple(t.arch for t in target.offered())


def stored_dims(entries: Sequence[Entry], family: str, dtype: str) -> list[tuple[int, int]]:
    """Pairs (K, V) that a family has CUDA binaries of, the usual ones first."""
    mine = [e.manifest for e in entries if e.manifest["kernel"].split(".")[0] == family]
    pairs = {(m["static"]["K"], m["static"]["V"]) for m in mine if m["dtype"] == dtype and "static" in m}
    return sorted(pairs, key=lambda pair: (pair not in USUAL_DIMS, pair))


def dims_to_try(session: Session, op: str, dtype: str) -> Sequence[tuple[int, int]]:
    """Head dims to run an op with. Where no binary is stored the first call is refused, and that is a failure."""
    if not session.cuda:
        return CPU_DIMS
    found = stored_dims(entries(session.device), op.removesuffix("_decode"), dtype)[: 1 if session.quick else MOST_DIMS]
    return found or list(USUAL_DIMS[:1])


# ---- section: kernels


def kernel_checks(session: Session) -> list[Check]:
    """Each stored CUDA binary that fits the device, every config, by its family's trial; it must equal the definition.

    A binary whose key no call asks for any more (its sources have changed since) is not run.
    """
    known = {
        kernel.name: (compiled.trial, kernel)
        for op in registry.all_ops().values()
        if (compiled := op.compiled.get("cuda")) is not None
        for kernel in compiled.kernels
    }
    found = [_kernel_check(entry, known, session.device) for entry in entries(session.device)]
    return sorted(found, key=lambda check: check.name) or [Check("binaries", partial(_none_stored, session.device))]


def _none_stored(device: torch.device) -> Found:
    archs = " or ".join(runnable_archs(device)) or "this device, for which there is no arch"
    raise WrongResult(f"no stored CUDA binary is for {archs}; build them elsewhere and set LINATTN_TL_CACHE_DIR")


def _kernel_check(entry: Entry, known: dict[str, tuple[Any, Kernel]], device: torch.device) -> Check:
    said = entry.manifest
    config = " ".join(f"{name}={value}" for name, value in said["config"].items())
    dims = f"{said['static']['K']}x{said['static']['V']}"
    name = f"{said['kernel']} {said['dtype']} {dims} {said['arch']} {config}"
    return Check(name, partial(_try_binary, entry, known, device))


def _try_binary(entry: Entry, known: dict[str, tuple[Any, Kernel]], device: torch.device) -> Found:
    said = entry.manifest
    if said["kernel"] not in known:
        raise NotRun("no op has this kernel any more")
    trial, kernel = known[said["kernel"]]
    problem = Problem(kernel.op, said["dtype"], said["static"]["K"], said["static"]["V"], "cuda", device.index or 0)
    arch = target.named(said["arch"])
    try:
        config = kernel.find_config(problem, arch, said["config"])
    except KeyError:
        raise NotRun("the kernel no longer offers this config") from None
    if entry.key not in {build.binary_key(kernel, problem, config, arch, checked) for checked in (True, False)}:
        raise NotRun("built from other sources than these: no call finds it")
    trial.check(kernel, problem, CudaLauncher(CudaBinary(entry.path), config), device)
    return Found()


# ---- calls of an op on a device


def state_argument(subject: Subject, tensors: Tensors) -> Any:
    """The state as the op takes it: a tuple where it has several parts."""
    parts = tuple(tensors[name] for name in subject.states)
    return parts[0] if len(parts) == 1 else parts


def named_state(subject: Subject, state: Any) -> Tensors:
    return dict(zip(subject.states, state if isinstance(state, tuple) else (state,), strict=True))


def index_on(device: torch.device, case: Case, values: tuple[int, ...] | None) -> torch.Tensor | None:
    """cu_seqlens or slots on the device."""
    index = conformance.index_of(case, values)
    return None if index is None else index.to(device)


def call(subject: Subject, case: Case, tensors: Tensors, backend: str) -> Tensors:
    """The public op on tensors of any device -> its named outputs. Decode works on a clone of the states."""
    return (_call_sequence if subject.differentiable else _call_decode)(subject, case, tensors, backend)


def _call_sequence(subject: Subject, case: Case, tensors: Tensors, backend: str) -> Tensors:
    tokens = [tensors[name] for name in subject.tokens]
    o, final = registry.get_op(subject.op).call(
        *tokens,
        initial_state=state_argument(subject, tensors) if case.state else None,
        output_final_state=case.final,
        cu_seqlens=index_on(tokens[0].device, case, case.cu),
        backend=backend,
        **case.keywords,
    )
    return {"o": o, **named_state(subject, final)} if case.final else {"o": o}


def _call_decode(subject: Subject, case: Case, tensors: Tensors, backend: str) -> Tensors:
    """Rows of the pool that no slot names must keep every bit."""
    tokens = [tensors[name][:, 0] if case.single else tensors[name] for name in subject.tokens]
    state = {name: _pool(tensors[name], case.layout) for name in subject.states}
    v = tokens[subject.tokens.index("v")]
    out = torch.full_like(v, float("nan"), memory_format=torch.contiguous_format)
    slots = index_on(v.device, case, case.slots)
    o = registry.get_op(subject.op).call(
        *tokens, state_argument(subject, state), slots=slots, out=out, backend=backend, **case.keywords
    )
    check_untouched(subject, case, tensors, state)
    return {"o": o.unsqueeze(1) if case.single else o, **state}


def _pool(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A copy of x in its own memory layout; "layers": one layer of a pool [P, layers, ...] for all of them."""
    return torch.stack((x, x), 1)[:, 0] if layout == "layers" else x.clone()


def check_untouched(subject: Subject, case: Case, before: Tensors, after: Tensors) -> None:
    """WrongResult unless the rows of the pool that no slot names have their old bits."""
    rows = before[subject.states[0]].shape[0]
    others = sorted(set(range(rows)) - set(range(case.B) if case.slots is None else case.slots))
    for name in subject.states:
        if not torch.equal(after[name][others], before[name][others]):
            raise WrongResult(f"{name}: a row of the pool that no slot names has changed")


def on_device(subject: Subject, case: Case, device: torch.device) -> tuple[Tensors, Tensors]:
    """The case's inputs, leaves on the CPU, and on the device; gradients flow back through the copy."""
    leaves = conformance.tensors_of(subject, case)
    return leaves, {name: x.to(device) for name, x in leaves.items()}


def check_served(op: str, backend: str) -> None:
    """WrongResult unless a named backend served the last call itself."""
    served = registry.last_backend(op)
    if backend not in ("auto", served):
        raise WrongResult(f"{op}: {served} served a call that named {backend}")


def check_outputs(subject: Subject, case: Case, outputs: Tensors) -> dict[str, float]:
    """The relative RMS error of each output, all within budget."""
    exact, plain = conformance.expected(subject.op, replace(case, backends=()))
    if outputs.keys() != exact.outputs.keys():
        raise WrongResult(f"the outputs are {', '.join(outputs)}; expected {', '.join(exact.outputs)}")
    return {
        name: verify.check_close(
            name, x.detach().cpu(), exact.outputs[name], plain=None if plain is None else plain.outputs[name]
        )
        for name, x in outputs.items()
    }


def check_forward(subject: Subject, case: Case, device: torch.device, backend: str) -> Found:
    """Without gradients, as one serves: the forward that keeps nothing for a backward."""
    with torch.no_grad():
        outputs = call(subject, case, on_device(subject, case, device)[1], backend)
    check_served(subject.op, backend)
    return _worst(check_outputs(subject, case, outputs))


def check_backward(subject: Subject, case: Case, device: torch.device, backend: str) -> Found:
    """Forward and every gradient, also of the initial state, with gradients of all outputs."""
    leaves, moved = on_device(subject, case, device)
    outputs = call(subject, case, moved, backend)
    check_served(subject.op, backend)
    errors = check_outputs(subject, case, outputs)
    exact, plain = conformance.expected(subject.op, replace(case, backends=()))
    found = conformance.differentiate(subject, case, {name: x.cpu() for name, x in outputs.items()}, leaves)
    for name, grad in found.items():
        want, rough = exact.grads[name], None if plain is None else plain.grads[name]
        conformance.check_grad(name, grad, leaves[name], want, rough, case.dtype)
        if want is not None and grad is not None:
            errors[f"d{name}"] = verify.relative_rms(grad, want)
    return _worst(errors)


def _worst(errors: dict[str, float]) -> Found:
    name = max(errors, key=lambda key: errors[key])
    return Found(f"at most {errors[name]:.1e} ({name})", {"relative_rms": errors})


# ---- section: ops

Options = tuple[tuple[str, Any], ...]
FULL: Options = (("causal", False),)
FORMS: dict[str, Options] = {
    "relu": (("feature_map", "relu"), ("eps", 0.1)),
    "identity": (("feature_map", "identity"), ("normalize", False), ("scale", None)),
    "normalize off": (("normalize", False), ("scale", 0.3)),
    "scale and eps": (("scale", 0.3), ("eps", 0.5)),
}


def sequence_cases(session: Session) -> tuple[Case, ...]:
    """Sizes, options and memory of the calls over whole sequences, but for dtype and head dims."""
    packed = {"packed": (0, 7, 71, 72, 172), "packed, empty ones": (0, 0, 33, 33, 70, 70)}
    short = (
        Case("whole chunks", T=128),
        Case("ragged", T=77),
        Case("T=1", T=1, state=True, final=True),
        Case("grouped heads", T=70, HV=6, state=True, final=True),
        Case("initial and final state", T=65, state=True, final=True),
        Case("final state alone", T=65, final=True),
        *(Case(i, B=1, T=cu[-1], cu=cu, HV=4, state=True, final=True) for i, cu in packed.items()),
        Case("heads first in memory", T=70, layout="heads-first", HV=4, state=True, final=True),
        *(Case(i, T=70, state=True, final=True, options=o) for i, o in FORMS.items()),
        Case("non-causal", T=70, HV=4, state=True, final=True, options=FULL),
        Case("non-causal, packed", B=1, T=72, cu=(0, 5, 5, 71, 72), final=True, options=FULL),
        Case("cross lengths", T=33, T_k=70, options=FULL),
        Case("no tokens", T=0, state=True, final=True),
    )
    if session.quick:
        return short
    return (
        *short,
        Case(f"T={LONG}", B=1, T=LONG, H=1, HV=1, state=True, final=True),
        Case(f"T={LONG}, packed", B=1, T=LONG, H=1, HV=1, cu=(0, 3000, 3000, LONG), state=True, final=True),
    )


def decode_cases(session: Session) -> tuple[Case, ...]:
    return (
        Case("one token", B=4, T=1, single=True, HV=4),
        Case("5 tokens", B=4, T=5, HV=4),
        Case("slots with padding", B=4, T=1, HV=4, slots=(3, -1, 0, -1)),
        Case("5 tokens, int32 slots", B=3, T=5, slots=(4, -1, 2), index="int32"),
        Case("nothing but padding", B=2, T=1, slots=(-1, -1)),
        Case("pool, heads first", B=3, T=2, HV=4, slots=(4, -1, 1), layout="heads-first"),
        Case("pool, columns first", B=3, T=2, HV=4, slots=(4, -1, 1), layout="column"),
        Case("pool, one of its layers", B=3, T=2, HV=4, slots=(4, -1, 1), layout="layers"),
        *(Case(i, B=2, T=3, options=o) for i, o in FORMS.items()),
    )


@dataclass(frozen=True)
class Pass:
    name: str
    check: Callable[[Subject, Case, torch.device, str], Found]


FORWARD, BACKWARD, DECODE = (
    Pass("forward", check_forward),
    Pass("backward", check_backward),
    Pass("decode", check_forward),
)


def op_checks(session: Session) -> list[Check]:
    """Every op x pass x dtype x head dims x case, through the public call."""
    return list(_op_checks(session))


def _op_checks(session: Session) -> Iterator[Check]:
    for subject in subjects(session):
        passes = (FORWARD, BACKWARD) if subject.differentiable else (DECODE,)
        cases = sequence_cases(session) if subject.differentiable else decode_cases(session)
        for dtype in DTYPES:
            for K, V in dims_to_try(session, subject.op, dtype):
                for case in (replace(c, dtype=dtype, K=K, V=V) for c in cases):
                    for one in passes:
                        name = f"{subject.op} {one.name} {dtype} {K}x{V}, {case.id}"
                        yield Check(name, partial(one.check, subject, case, session.device, session.backend))


def subjects(session: Session) -> list[Subject]:
    """What tests/ops says of every op with kernels for the device; KeyError for one that it says nothing of."""
    known, kind = conformance.subjects(), "cuda" if session.cuda else "cpu"
    return [known[name] for name, op in registry.all_ops().items() if kind in op.compiled]
