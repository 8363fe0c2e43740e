"""Scalar-gated linear attention, and its named forms: RetNet, Lightning Attention, Mamba-2's SSD.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T        o_t = scale q_t^T S_t

g is the natural logarithm of a decay of each value head and token, at most 0. The state is fp32 whatever the inputs
are.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import signature
from typing import Any

import torch

from linattn_tl import apply, calls, loader, registry, shapes
from linattn_tl.arrays import with_cupy
from linattn_tl.ops.simple_gla.arrays import ArrayDecode, ArrayRunner
from linattn_tl.ops.simple_gla.cpu import PASS, STEP, CpuDecode, CpuRunner
from linattn_tl.ops.simple_gla.cuda import CudaDecode, CudaRunner
from linattn_tl.ops.simple_gla.definition import Options, TorchRunner, decode
from linattn_tl.registry import Autograd, Choice, Compiled, Op
from linattn_tl.repeats import Repeats
from linattn_tl.spans import refuse_sizes, serving
from tl_kernels.simple_gla import cpu as kernels
from tl_kernels.simple_gla import cuda as cuda_kernels
from tl_kernels.simple_gla import cuda_decode
from tl_kernels.spec import Problem

__all__ = [
    "lightning_attention",
    "lightning_attention_decode",
    "retention",
    "retention_decode",
    "simple_gla",
    "simple_gla_decode",
    "ssd",
    "ssd_decode",
]

NAME, DECODE = "simple_gla", "simple_gla_decode"
_traced_by_dynamo = torch.compiler.is_dynamo_compiling
_passes, _steps = Repeats(NAME, PASS), Repeats(DECODE, STEP)
State = torch.Tensor


def simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, State | None]:
    """Linear attention with a decay of each value head and token, over whole sequences, causally.

        S_t = exp(g_t) S_{t-1} + k_t v_t^T        o_t = scale q_t^T S_t

    Args:
        q, k: [B, T, H, K], float32, bfloat16, float16 or float64; any strides.
        v: [B, T, HV, V] values, HV a multiple of H: q/k head h serves value heads h * HV/H and those up to the next.
        g: [B, T, HV] natural logarithm of the decay, <= 0, in any of these dtypes; used in fp32. 0 keeps the state,
            -inf forgets it.
        scale: multiplies q; None means K ** -0.5.
        initial_state: [N, HV, K, V], fp32, N sequences; zeros when None.
        output_final_state: also return the state after the last token.
        cu_seqlens: int32 or int64 [N + 1], 0 first, T last: packs N sequences along T, with B = 1; one may be empty.
        backend: "auto", or one of "binary", "jit", "cupy", "torch", which then never falls back.

    Returns:
        (o [B, T, HV, V] in v's dtype, the final state or None). Differentiable in q, k, v, g and the initial state,
        through o and the final state; more than once through the torch definition.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, size, dtype, device or value; the text names it.
        UnsupportedError: a named backend cannot serve the call, or none can with LINATTN_TL_STRICT=1.

    Under torch.autocast, q, k and v are cast to the autocast dtype; otherwise mixed dtypes are promoted.

    Where a gradient is wanted, kernels keep a state for every 64 tokens, K * V / 16 bytes a token and value head (half
    of that for bfloat16 on a GPU), until backward has run; under torch.compile backward computes them again.

    Source: Yang et al. 2023, arXiv 2312.06635, section 3 with one gate a head; Dao and Gu 2024, arXiv 2405.21060.
    """
    plain = scale, output_final_state, backend
    if cu_seqlens is None and not _traced_by_dynamo():
        found = _passes.again(q, k, v, g, initial_state, *plain)
        if found is not None:
            return (found[0], found[1]) if output_final_state else (found, None)
    return _pass(NAME, q, k, v, g, initial_state, cu_seqlens, *plain)


def simple_gla_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    state: State,
    *,
    scale: float | None = None,
    slots: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """One token, or a few, a sequence: reads and updates the state in place.

        S = exp(g) S + k v^T        o = scale q^T S

    Args:
        q, k: [B, H, K], or [B, n, H, K] for n tokens one after the other.
        v: [B, HV, V] or [B, n, HV, V].
        g: [B, HV] or [B, n, HV], as in simple_gla.
        state: [P, HV, K, V], fp32, changed in place; a new row is all zeros. P = B without slots.
        scale: as in simple_gla.
        slots: int32 or int64 [B], the row of the pool of each sequence, no row twice; -1 is padding: its o is 0 and no
            state is touched.
        out: a tensor like v to write o to.
        backend: "auto", or one of "binary", "jit", "cupy", "torch".

    Returns:
        o, shaped and typed like v (`out`, if it was given).

    Raises:
        ValueError, TypeError: as in simple_gla, also for tensors that require a gradient while gradients are recorded:
            an in-place step has none.

    Source: as simple_gla.
    """
    if not _traced_by_dynamo():
        o = _steps.again(q, k, v, g, state, slots, out, scale, backend)
        if o is not None:
            return o
    return _step(DECODE, q, k, v, g, state, slots, out, scale, backend)


# ---- named forms: gates, keys and values of their own, on the same kernels


def retention_gates(heads: int, device: torch.device | None = None) -> torch.Tensor:
    """RetNet's g [heads] = log(1 - 2^(-5 - h)), in fp32. Source: Sun et al. 2023, arXiv 2307.08621, eq. 8."""
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(heads, dtype=torch.float32, device=device)))


def retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, State | None]:
    """RetNet's retention over whole sequences: simple_gla with a fixed decay of each value head.

        S_t = gamma_h S_{t-1} + k_t v_t^T        o_t = scale q_t^T S_t        gamma_h = 1 - 2^(-5 - h)

    Rotary position and RetNet's group norm are the caller's. Arguments, returns and errors as in simple_gla.

    Source: Sun et al. 2023, arXiv 2307.08621, eq. 6-8.
    """
    tokens = _retention_tokens("retention", q, k, v)
    return _pass("retention", *tokens, initial_state, cu_seqlens, scale, output_final_state, backend)


def retention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: State,
    *,
    scale: float | None = None,
    slots: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """One token of retention, or a few, a sequence, in place. Arguments, returns and errors as in simple_gla_decode.

    Source: Sun et al. 2023, arXiv 2307.08621, eq. 6.
    """
    tokens = _retention_tokens("retention_decode", q, k, v)
    return _step("retention_decode", *tokens, state, slots, out, scale, backend)


def _retention_tokens(op: str, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any, Any]:
    """q, k, v and g of simple_gla."""
    shapes.check_tensors(op, q=q, k=k, v=v)
    return q, k, v, _of_each_head(op, "v", v, retention_gates(v.shape[-2] if v.ndim > 2 else 0, v.device))


def lightning_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slope: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, State | None]:
    """Lightning Attention over whole sequences: simple_gla with g = -slope of each value head.

        S_t = exp(-slope_h) S_{t-1} + k_t v_t^T        o_t = scale q_t^T S_t

    Args:
        slope: [HV], >= 0; differentiable.
        others, returns and errors: as in simple_gla.

    Source: Qin et al. 2024, arXiv 2401.04658, eq. 4-5.
    """
    tokens = _lightning_tokens("lightning_attention", q, k, v, slope)
    return _pass("lightning_attention", *tokens, initial_state, cu_seqlens, scale, output_final_state, backend)


def lightning_attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slope: torch.Tensor,
    state: State,
    *,
    scale: float | None = None,
    slots: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """One token of Lightning Attention, or a few, a sequence, in place; slope as in lightning_attention.

    Others, returns and errors as in simple_gla_decode. Source: Qin et al. 2024, arXiv 2401.04658, eq. 4-5.
    """
    tokens = _lightning_tokens("lightning_attention_decode", q, k, v, slope)
    return _step("lightning_attention_decode", *tokens, state, slots, out, scale, backend)


def _lightning_tokens(op: str, q: Any, k: Any, v: Any, slope: Any) -> tuple[Any, Any, Any, Any]:
    """q, k, v and g of simple_gla."""
    shapes.check_tensors(op, q=q, k=k, v=v, slope=slope)
    return q, k, v, _of_each_head(op, "slope", v, -slope)


def _of_each_head(op: str, name: str, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """g [HV] for every token of v, without a copy."""
    axes = 3 if op.endswith("_decode") else 4  # one more will do where it is 3
    if v.ndim != axes and (axes, v.ndim) != (3, 4):
        raise ValueError(f"{op}: v has shape {tuple(v.shape)}; expected {axes} axes [B{', T' * (axes - 3)}, HV, V]")
    shapes.bind_shapes(op, v=((v.shape[-2],), "HV"), **({} if name == "v" else {name: (g, "HV")}))
    return g.to(calls.wide(v.dtype)).expand(v.shape[:-1])


def ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    *,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, State | None]:
    """Mamba-2's state space dual form over whole sequences, by its own names.

        h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T        y_t = C_t^T h_t + D x_t        times silu(z_t), if given

    It is simple_gla with q = C, k = B, v = dt x, g = dt A and scale 1.

    Args:
        x: [B, T, heads, head dim].
        dt: [B, T, heads], the step, >= 0 after the next two: dt + dt_bias [heads], then softplus if dt_softplus.
        A: [heads], < 0.
        B, C: [B, T, groups, d_state]; heads is a multiple of groups.
        D: [heads] or [heads, head dim].
        z: like x, a gate on the output.
        initial_state: [N, heads, d_state, head dim], fp32: a transposed view of Mamba-2's own [N, heads, head dim,
            d_state].
        others: as in simple_gla.

    Returns:
        (y like x, the final state or None). Differentiable in everything.

    Raises: as simple_gla.

    Source: Dao and Gu 2024, arXiv 2405.21060, eq. 16 and section 6; the arguments are those of its code.
    """
    y, q, k, v, g = _ssd_tokens("ssd", x, dt, A, B, C, D, z, dt_bias, dt_softplus)
    o, state = _pass("ssd", q, k, v, g, initial_state, cu_seqlens, 1.0, output_final_state, backend)
    return _ssd_output(o, y, z), state


def ssd_decode(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    state: State,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    *,
    slots: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """One token of ssd, or a few, a sequence: x [B, heads, head dim] or [B, n, heads, head dim], others likewise.

    state, slots, errors: as in simple_gla_decode. The rest: as in ssd; Source: Dao and Gu 2024, arXiv 2405.21060.
    """
    y, q, k, v, g = _ssd_tokens("ssd_decode", x, dt, A, B, C, D, z, dt_bias, dt_softplus)
    return _ssd_output(_step("ssd_decode", q, k, v, g, state, slots, None, 1.0, backend), y, z)


def _ssd_tokens(
    op: str, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, dt_bias: Any, dt_softplus: bool
) -> tuple[Any, Any, Any, Any, Any]:
    """(D x or None, q, k, v, g) of simple_gla."""
    given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    given = {name: y for name, y in given.items() if y is not None}
    shapes.check_tensors(op, **given)
    shapes.check_device(op, "x", x.device, **given)
    lead = "B" if op.endswith("_decode") and x.ndim == 3 else "B T"
    letters = {"x": f"{lead} heads P", "dt": f"{lead} heads", "A": "heads", "B": f"{lead} groups N"}
    letters |= {"C": f"{lead} groups N", "z": f"{lead} heads P", "dt_bias": "heads"}
    letters["D"] = "heads P" if D is not None and D.ndim == 2 else "heads"
    n = shapes.bind_shapes(op, **{name: (y, letters[name]) for name, y in given.items()})
    if n["groups"] < 1 or n["heads"] % n["groups"]:
        raise ValueError(f"{op}: x has {n['heads']} heads; expected a multiple of {n['groups']} groups (from B)")
    wide = calls.wide(x.dtype)
    step = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    if dt_softplus:
        step = torch.nn.functional.softplus(step)
    v = (x.to(wide) * step.unsqueeze(-1)).to(x.dtype)
    y = None if D is None else x.to(wide) * (D if D.ndim == 2 else D.unsqueeze(-1)).to(wide)
    return y, C, B, v, step * A.to(wide)


def _ssd_output(o: torch.Tensor, y: torch.Tensor | None, z: torch.Tensor | None) -> torch.Tensor:
    wide = o if y is None else o.to(y.dtype) + y
    if z is not None:
        wide = wide * torch.nn.functional.silu(z.to(wide.dtype))
    return wide.to(o.dtype)


# ---- calls with all checks


def _pass(
    op: str, q: Any, k: Any, v: Any, g: Any, initial_state: Any, cu_seqlens: Any, *plain: Any
) -> tuple[torch.Tensor, State | None]:
    """simple_gla; op is what messages call it, plain as its repeats have it."""
    scale, output_final_state, backend = plain
    inputs, opt = _bind(op, q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)

    def remember(choice: Choice, outputs: Sequence[Any]) -> None:
        if cu_seqlens is None and calls.same(inputs[:4], (q, k, v, g)):
            _passes.served(choice.backend, q.shape, plain, lambda: choice.runner.call(inputs, opt, outputs))

    o, state = apply.apply(OP, _problem(inputs), inputs, cu_seqlens, opt, backend, remember, op)
    if o.dtype != v.dtype and calls.autocast_dtype(v) is None:
        o = o.to(v.dtype)
    return o, state


def _step(op: str, q: Any, k: Any, v: Any, g: Any, state: Any, slots: Any, out: Any, *plain: Any) -> torch.Tensor:
    """simple_gla_decode; op is what messages call it, plain as its repeats have it."""
    scale, backend = plain
    tokens, opt = _bind_decode(op, q, k, v, g, state, scale, slots, out)
    o = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
    if apply.traced(*tokens, state):
        torch.ops.linattn_tl.simple_gla_decode(*tokens, state, o, slots, opt.scale, backend)
        return o
    if out is not None:
        calls.check_out(op, out, state=state)
    choice = calls.step(DECODE_OP, tokens, {"state": state}, slots, opt, o, backend, op)
    if choice.backend in registry.COMPILED and calls.same(tokens, (q, k, v, g)):
        _steps.served(choice.backend, q.shape, plain, lambda: choice.runner.call(*tokens, state, slots, opt, o))
    return o


# ---- checks


def _bind(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
) -> tuple[tuple[Any, ...], Options]:
    """Every check that needs no values; returns the differentiable inputs and the options."""
    shapes.check_tensors(op, q=q, k=k, v=v, g=g)
    shapes.check_device(op, "q", q.device, k=k, v=v, g=g)
    known = _known.__wrapped__ if torch.compiler.is_compiling() else _known
    n, dtype, opt = known(
        op, "B T", q.shape, k.shape, v.shape, g.shape, q.dtype, k.dtype, v.dtype, calls.autocast_dtype(q), scale,
        bool(output_final_state),
    )  # fmt: skip
    q, k, v, g = _cast(op, q, k, v, g, dtype)
    N = n["B"] if cu_seqlens is None else calls.bind_lengths(op, cu_seqlens, q)
    if initial_state is not None:
        calls.check_kv(op, "initial_state", initial_state, {**n, "N": N}, "N", q)
    return (q, k, v, g, initial_state), opt


def _bind_decode(
    op: str, q: Any, k: Any, v: Any, g: Any, state: Any, scale: float | None = None, slots: Any = None, out: Any = None
) -> tuple[tuple[Any, Any, Any, Any], Options]:
    shapes.check_tensors(op, q=q, k=k, v=v, g=g)
    shapes.check_device(op, "q", q.device, k=k, v=v, g=g)
    known = _known.__wrapped__ if torch.compiler.is_compiling() else _known
    n, dtype, opt = known(
        op, "B" if q.ndim == 3 else "B n", q.shape, k.shape, v.shape, g.shape, q.dtype, k.dtype, v.dtype,
        calls.autocast_dtype(q), scale, True,
    )  # fmt: skip
    if out is not None:
        calls.bind_out(op, out, v)
    given = {"q": q, "k": k, "v": v, "g": g, "state": state if isinstance(state, torch.Tensor) else None, "out": out}
    q, k, v, g = _cast(op, q, k, v, g, dtype)
    rows = n["B"]
    if slots is not None:
        calls.bind_slots(op, slots, q)
        rows = state.shape[0] if isinstance(state, torch.Tensor) and state.ndim else rows
    calls.refuse_transforms(op, op.removesuffix("_decode"))
    calls.check_kv(op, "state", state, {**n, "P": rows}, "P", q)
    calls.refuse_gradients(op, **given)
    return (q, k, v, g), opt


@lru_cache(maxsize=1024)
def _known(
    op: str, lead: str, q: Any, k: Any, v: Any, g: Any, q_dtype: Any, k_dtype: Any, v_dtype: Any, autocast: Any,
    scale: Any, final: bool,
) -> tuple[dict[str, int], Any, Options]:  # fmt: skip
    """What shapes, dtypes and plain arguments say: sizes, the dtype to cast q, k and v to or None, the options.

    Remembered, since a model calls with few of them, many times.
    """
    letters = {"q": "H K", "k": "H K", "v": "HV V", "g": "HV"}
    given = {"q": q, "k": k, "v": v, "g": g}
    n = shapes.bind_shapes(op, **{name: (x, f"{lead} {letters[name]}") for name, x in given.items()})
    shapes.check_heads(op, n["H"], n["HV"])
    dtype = calls.common_dtype(op, (q_dtype, k_dtype, v_dtype), autocast)
    if not isinstance(scale, int | float) and scale is not None:
        raise TypeError(f"{op}: scale is {type(scale).__name__}; expected a number")
    return n, dtype, Options(max(n["K"], 1) ** -0.5 if scale is None else float(scale), final)


def _cast(op: str, q: Any, k: Any, v: Any, g: Any, dtype: torch.dtype | None) -> tuple[Any, Any, Any, Any]:
    """q, k and v in their common dtype, g in the one of states."""
    shapes.check_dtype(op, "g", g.dtype, calls.FLOATS)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v, g.to(calls.wide(q.dtype))


def _check_values(inputs: Sequence[Any], lengths: Any, op: str = NAME) -> None:
    if lengths is not None:
        shapes.check_lengths(op, lengths, inputs[0].shape[1])


def _form(call: Callable[..., Any], tokens: Callable[..., Any], bind: Callable[..., Any]) -> Callable[..., Problem]:
    """What binds the arguments of a named form: tokens (q, k, v and g last) are made of some, the rest is bind's."""
    made = list(signature(tokens).parameters)[1:]

    def problem(*args: Any, **kwargs: Any) -> Problem:
        given = signature(call).bind(*args, **kwargs)
        given.apply_defaults()
        rest = {name: x for name, x in given.arguments.items() if name not in (*made, "backend")}
        found = tokens(call.__name__, *(given.arguments[name] for name in made))
        return _problem(bind(call.__name__, *found[-4:], **rest)[0], DECODE if bind is _bind_decode else NAME)

    return problem


def _library_step(q: Any, k: Any, v: Any, g: Any, state: Any, out: Any, slots: Any, scale: float, backend: str) -> None:
    opt = Options(scale, output_final_state=True)
    calls.step(DECODE_OP, (q, k, v, g), {"state": state}, slots, opt, out, backend)


# ---- what the house needs to know


def _problem(inputs: Sequence[Any], op: str = NAME) -> Problem:
    return calls.problem_of(op, inputs[0], inputs[2])


def _meta(inputs: Sequence[Any], lengths: Any, opt: Options) -> tuple[Any, ...]:
    """Empty o and final state, with None for one that forward leaves out."""
    q, _, v, _, _ = inputs
    N = q.shape[0] if lengths is None else lengths.shape[0] - 1
    o = v.new_empty(v.shape)
    state = v.new_empty(N, v.shape[2], q.shape[3], v.shape[3], dtype=calls.wide(q.dtype))
    return o, state if opt.output_final_state else None


_CUDA_PASSES = tuple(k for k in cuda_kernels.KERNELS if k != cuda_decode.DECODE)
_TRIAL, _TRIAL_CUDA = f"{__name__}.trial", f"{__name__}.trial_cuda"
_PASSES = {
    "cpu": Compiled((kernels.FWD, kernels.BWD), lambda found, _: CpuRunner(found), _TRIAL),
    "cuda": Compiled(
        _CUDA_PASSES, lambda found, gpu: CudaRunner(found, gpu.cores), _TRIAL_CUDA, refuse_sizes, serving(_CUDA_PASSES)
    ),
}
_STEPS = {
    "cpu": Compiled((kernels.DECODE,), lambda found, _: CpuDecode(found), _TRIAL),
    "cuda": Compiled((cuda_decode.DECODE,), lambda found, _: CudaDecode(found), _TRIAL_CUDA, refuse_sizes),
}
OP = Op(
    name=NAME,
    call=simple_gla,
    bind=lambda *args, backend="auto", **kwargs: _problem(_bind(NAME, *args, **kwargs)[0]),
    impls=with_cupy(loader.impls(_PASSES, TorchRunner), ArrayRunner),
    compiled=_PASSES,
    forms={
        "retention": _form(retention, _retention_tokens, _bind),
        "lightning_attention": _form(lightning_attention, _lightning_tokens, _bind),
        "ssd": _form(ssd, _ssd_tokens, _bind),
    },
    autograd=Autograd(
        inputs=("q", "k", "v", "g", "initial_state"),
        required=frozenset({"q", "k", "v", "g"}),
        outputs=("o", "state"),
        saved=(),
        options=Options,
        problem=_problem,
        check_values=_check_values,
        meta=_meta,
        wanted=lambda opt: (True, opt.output_final_state),
        reference=TorchRunner(),
    ),
)
DECODE_OP = Op(
    name=DECODE,
    call=simple_gla_decode,
    bind=lambda *args, backend="auto", **kwargs: _problem(_bind_decode(DECODE, *args, **kwargs)[0], DECODE),
    impls=with_cupy(loader.impls(_STEPS, lambda: decode), ArrayDecode),
    compiled=_STEPS,
    forms={
        "retention_decode": _form(retention_decode, _retention_tokens, _bind_decode),
        "lightning_attention_decode": _form(lightning_attention_decode, _lightning_tokens, _bind_decode),
        "ssd_decode": _form(ssd_decode, _ssd_tokens, _bind_decode),
    },
)
OPS = (OP, DECODE_OP)
apply.register(OP)
apply.register_inplace(
    DECODE,
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor(a!) state, Tensor(b!) out, Tensor? slots, float scale, "
    "str backend) -> ()",
    _library_step,
)
