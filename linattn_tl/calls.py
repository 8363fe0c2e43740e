"""What public ops check and settle alike, whatever the family."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from linattn_tl import apply, registry, shapes
from linattn_tl.registry import Choice, Op
from tl_kernels.spec import Problem

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_increment_version = torch.autograd.graph.increment_version
DTYPE_NAMES = {d: str(d).removeprefix("torch.") for d in FLOATS}


def problem_of(op: str, q: torch.Tensor, v: torch.Tensor) -> Problem:
    """What shapes a call's kernels: q [..., K] and v [..., V], of one dtype on one device."""
    where = ("cpu", 0) if q.is_cpu else (q.device.type, q.device.index or 0)
    return Problem(op, DTYPE_NAMES[q.dtype], q.shape[-1], v.shape[-1], *where)


def same(tensors: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether they are the same objects, so that nothing was cast or mapped."""
    return all(x is y for x, y in zip(tensors, others, strict=True))


# ---- dtypes


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and gates beside q, k and v of this one."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype that autocast asks for, or None outside of it."""
    if not torch._C._is_any_autocast_enabled():
        return None
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def common_dtype(op: str, dtypes: Sequence[torch.dtype], autocast: torch.dtype | None) -> torch.dtype | None:
    """The dtype that q, k and v are to be cast to: autocast's, or the one that all promote to. None: leave them."""
    for name, dtype in zip("qkv", dtypes, strict=True):
        shapes.check_dtype(op, name, dtype, FLOATS)
    q, k, v = dtypes
    if autocast is not None and torch.float64 not in dtypes:
        return None if q == k == v == autocast else autocast
    return None if q == k == v else torch.promote_types(torch.promote_types(q, k), v)


# ---- index tensors


def bind_lengths(op: str, cu_seqlens: Any, q: torch.Tensor) -> int:
    """Check all of cu_seqlens but its values; returns N, how many sequences q [1, T, ...] packs."""
    shapes.check_tensors(op, cu_seqlens=cu_seqlens)
    shapes.bind_shapes(op, cu_seqlens=(cu_seqlens, "N+1"))
    shapes.check_dtype(op, "cu_seqlens", cu_seqlens.dtype, (torch.int32, torch.int64))
    shapes.check_device(op, "q", q.device, cu_seqlens=cu_seqlens)
    if q.shape[0] != 1:
        raise ValueError(f"{op}: q has B = {q.shape[0]} with cu_seqlens; expected B = 1, sequences packed along T")
    return cu_seqlens.shape[0] - 1


def bind_slots(op: str, slots: Any, q: torch.Tensor) -> None:
    """Check all of slots but their values, for a step over q [B, ...]."""
    shapes.check_tensors(op, slots=slots)
    shapes.bind_shapes(op, q=((q.shape[0],), "B"), slots=(slots, "B"))
    shapes.check_dtype(op, "slots", slots.dtype, (torch.int32, torch.int64))
    shapes.check_device(op, "q", q.device, slots=slots)


# ---- states


def check_kv(op: str, name: str, state: Any, n: dict[str, int], letter: str, q: torch.Tensor) -> None:
    """state is [N, HV, K, V] in the dtype of states; n has the sizes, and letter names the first."""
    letters = (letter, "HV", "K", "V")
    if not isinstance(state, torch.Tensor):
        raise TypeError(f"{op}: {name} is {type(state).__name__}; expected a tensor [{', '.join(letters)}]")
    expected = tuple(n[x] for x in letters)
    if tuple(state.shape) != expected:
        raise ValueError(f"{op}: {name} has shape {tuple(state.shape)}; expected [{', '.join(letters)}] = {expected}")
    shapes.check_dtype(op, name, state.dtype, (wide(q.dtype),))
    shapes.check_device(op, "q", q.device, **{name: state})


# ---- steps, which write in place


def bind_out(op: str, out: Any, v: torch.Tensor) -> None:
    """out must be like v."""
    shapes.check_tensors(op, out=out)
    if out.shape != v.shape:
        letters = "B HV V" if v.ndim == 3 else "B n HV V"
        shapes.bind_shapes(op, v=(v, letters), out=(out, letters))
    if out.dtype != v.dtype:
        shapes.check_dtype(op, "out", out.dtype, (v.dtype,))
    if out.device != v.device:
        shapes.check_device(op, "v", v.device, out=out)


def check_out(op: str, out: torch.Tensor, **states: torch.Tensor) -> None:
    """out is memory of its own. Reads addresses: not possible while tracing."""
    shapes.check_writable(op, "out", out)
    for name, x in states.items():
        if shapes.shares_memory(out, x):
            raise ValueError(f"{op}: out shares memory with {name}; expected memory of its own")


def refuse_transforms(op: str, instead: str) -> None:
    if apply.transformed():
        raise NotImplementedError(
            f"{op}: a step in place has no derivative and no batch rule; under torch.func and forward-mode AD "
            f"expected {instead} with initial_state and output_final_state"
        )


def refuse_gradients(op: str, **tensors: torch.Tensor | None) -> None:
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if x is not None and x.requires_grad:
            raise ValueError(f"{op}: {name} requires a gradient; expected torch.no_grad(), the step is in place")


def step(
    op: Op,
    tokens: Sequence[torch.Tensor],
    states: Mapping[str, torch.Tensor],
    slots: torch.Tensor | None,
    opt: Any,
    out: torch.Tensor,
    backend: str,
    called: str = "",
) -> Choice:
    """Checks that read values or memory, then the step itself, into states and out.

    tokens: q, k, v, and gates. called: what messages call the op, where that is another form of it.
    """
    for name, x in states.items():
        shapes.check_writable(called or op.name, name, x)
    given = tuple(states.values())
    choice = registry.choose(op, problem_of(op.name, tokens[0], tokens[2]), backend)
    if slots is not None and not (slots.is_cuda and choice.backend in registry.COMPILED):
        shapes.check_slots(called or op.name, slots.tolist(), given[0].shape[0])
    registry.note_backend(op.name, choice.backend)
    dtype = tokens[0].dtype
    if out.dtype == dtype:
        choice.runner(*tokens, *given, slots, opt, out)
    else:  # q, k, v of mixed dtypes were promoted
        with torch.no_grad():
            out.copy_(choice.runner(*tokens, *given, slots, opt, out.to(dtype)))
    _increment_version((*given, out))
    return choice
