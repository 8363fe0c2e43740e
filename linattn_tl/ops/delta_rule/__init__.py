"""The delta rule and the gated delta rule (DeltaNet, Gated DeltaNet, Qwen3-Next).

    Sbar = exp(g_t) S_{t-1}      u_t = beta_t (v_t - Sbar^T k_t)      S_t = Sbar + k_t u_t^T      o_t = scale q_t^T S_t

g is the natural logarithm of a decay of each value head and token, at most 0; the delta rule has none. The state is
fp32 whatever the inputs are.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch.nn.functional import softplus

from linattn_tl import apply, calls, loader, registry, shapes
from linattn_tl.arrays import with_cupy
from linattn_tl.ops.delta_rule.arrays import ArrayDecode, ArrayRunner
from linattn_tl.ops.delta_rule.cpu import PASS, STEP, CpuDecode, CpuRunner
from linattn_tl.ops.delta_rule.cuda import CudaDecode, CudaRunner
from linattn_tl.ops.delta_rule.definition import Options, TorchRunner, decode
from linattn_tl.registry import Autograd, Choice, Compiled, Op
from linattn_tl.repeats import Repeats
from linattn_tl.spans import refuse_sizes, serving
from tl_kernels.delta_rule import cpu as kernels
from tl_kernels.delta_rule import cuda as cuda_kernels
from tl_kernels.delta_rule import cuda_decode
from tl_kernels.spec import Problem

__all__ = ["delta_rule", "delta_rule_decode", "gated_delta_rule", "gated_delta_rule_decode"]

NAME, DECODE = "delta_rule", "delta_rule_decode"
_traced_by_dynamo = torch.compiler.is_dynamo_compiling
_passes, _steps = Repeats(NAME, PASS), Repeats(DECODE, STEP)
State = torch.Tensor


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    beta_is_logit: bool = False,
    allow_neg_eigval: bool = False,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, State | None]:
    """The gated delta rule over whole sequences, causally.

        Sbar = exp(g_t) S_{t-1}    u_t = beta_t (v_t - Sbar^T k_t)    S_t = Sbar + k_t u_t^T    o_t = scale q_t^T S_t

    Args:
        q, k: [B, T, H, K], float32, bfloat16, float16 or float64; any strides.
        v: [B, T, HV, V] values, HV a multiple of H: q/k head h serves value heads h * HV/H and those up to the next.
        g: [B, T, HV] natural logarithm of the decay, <= 0, in any of these dtypes; used in fp32. 0 keeps the state,
            -inf forgets it. With A_log, the raw gate: the decay is then -exp(A_log) softplus(g + dt_bias).
        beta: [B, T, HV] how much of what a key stands for is written anew, in [0, 1], or in [0, 2] for eigenvalues of
            either sign; used in fp32. With beta_is_logit, sigmoid(beta).
        scale: multiplies q; None means K ** -0.5.
        qk_l2norm: q and k are divided by sqrt(sum x^2 + 1e-6) of each row first. The recurrence is stable for keys of
            length 1, and grows without bound for much longer ones.
        A_log, dt_bias: [HV], see g; dt_bias only with A_log.
        beta_is_logit, allow_neg_eigval: see beta; the second doubles the sigmoid, and asks for the first.
        initial_state: [N, HV, K, V], fp32, N sequences; zeros when None.
        output_final_state: also return the state after the last token.
        cu_seqlens: int32 or int64 [N + 1], 0 first, T last: packs N sequences along T, with B = 1; one may be empty.
        backend: "auto", or one of "binary", "jit", "cupy", "torch", which then never falls back.

    Returns:
        (o [B, T, HV, V] in v's dtype, the final state or None). Differentiable in q, k, v, g, beta, A_log, dt_bias and
        the initial state, through o and the final state; more than once through the torch definition.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, size, dtype, device or value; the text names it.
        UnsupportedError: a named backend cannot serve the call, or none can with LINATTN_TL_STRICT=1.

    Under torch.autocast, q, k and v are cast to the autocast dtype; otherwise mixed dtypes are promoted.

    Where a gradient is wanted, compiled kernels keep 4 V + K * V / 16 bytes a token and value head until backward has
    run, a GPU's between half and twice as much; under torch.compile nothing is kept, and backward computes it again.

    Source: Yang et al. 2024, arXiv 2412.06464, eq. 10, and for the gate Dao and Gu 2024, arXiv 2405.21060.
    """
    op = "gated_delta_rule"
    if g is None:
        shapes.check_tensors(op, g=g)
    g, beta = _gates(op, v, g, beta, A_log, dt_bias, beta_is_logit, allow_neg_eigval)
    return _called(op, q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, output_final_state, backend)


def gated_delta_rule_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: State,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    beta_is_logit: bool = False,
    allow_neg_eigval: bool = False,
    slots: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """One token, or a few, a sequence: reads and updates the state in place.

        S = exp(g) S      u = beta (v - S^T k)      S = S + k u^T      o = scale q^T S

    Args:
        q, k: [B, H, K], or [B, n, H, K] for n tokens one after the other.
        v: [B, HV, V] or [B, n, HV, V].
        g, beta: [B, HV] or [B, n, HV]; they, scale, qk_l2norm, A_log, dt_bias, beta_is_logit and allow_neg_eigval as
            in gated_delta_rule.
        state: [P, HV, K, V], fp32, changed in place; a new row is all zeros. P = B without slots.
        slots: int32 or int64 [B], the row of the pool of each sequence, no row twice; -1 is padding: its o is 0 and no
            state is touched.
        out: a tensor like v to write o to.
        backend: "auto", or one of "binary", "jit", "cupy", "torch".

    Returns:
        o, shaped and typed like v (`out`, if it was given).

    Raises:
        ValueError, TypeError: as in gated_delta_rule, also for tensors that require a gradient while gradients are
            recorded: an in-place step has none.

    Source: as gated_delta_rule.
    """
    op = "gated_delta_rule_decode"
    if g is None:
        shapes.check_tensors(op, g=g)
    g, beta = _gates(op, v, g, beta, A_log, dt_bias, beta_is_logit, allow_neg_eigval)
    return _stepped(op, q, k, v, g, beta, state, slots, out, scale, qk_l2norm, backend)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    beta_is_logit: bool = False,
    allow_neg_eigval: bool = False,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, State | None]:
    """The delta rule over whole sequences, causally: gated_delta_rule without a decay.

        u_t = beta_t (v_t - S_{t-1}^T k_t)        S_t = S_{t-1} + k_t u_t^T        o_t = scale q_t^T S_t

    Arguments, returns and errors as in gated_delta_rule. Source: Yang et al. 2024, arXiv 2406.06484, eq. 3-4.
    """
    beta = _gates("delta_rule", v, None, beta, None, None, beta_is_logit, allow_neg_eigval)[1]
    plain = scale, qk_l2norm, output_final_state, backend
    return _called("delta_rule", q, k, v, None, beta, initial_state, cu_seqlens, *plain)


def delta_rule_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    state: State,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    beta_is_logit: bool = False,
    allow_neg_eigval: bool = False,
    slots: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """One token of the delta rule, or a few, a sequence, in place. All as in gated_delta_rule_decode, without g.

    Source: Yang et al. 2024, arXiv 2406.06484, eq. 3-4.
    """
    beta = _gates("delta_rule_decode", v, None, beta, None, None, beta_is_logit, allow_neg_eigval)[1]
    return _stepped("delta_rule_decode", q, k, v, None, beta, state, slots, out, scale, qk_l2norm, backend)


# ---- gates and logits


def _gates(
    op: str, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, beta_is_logit: bool, allow_neg_eigval: bool
) -> tuple[Any, Any]:
    """g as a logarithm of decays, and beta as a factor; themselves where they are that already."""
    if allow_neg_eigval and not beta_is_logit:
        raise ValueError(f"{op}: allow_neg_eigval doubles a sigmoid; expected beta_is_logit=True, or beta in [0, 2]")
    if dt_bias is not None and A_log is None:
        raise ValueError(f"{op}: dt_bias is given without A_log; expected both, or the logarithm of a decay in g")
    if A_log is not None:
        g = _decay_of(op, v, g, A_log, dt_bias)
    if beta_is_logit:
        shapes.check_tensors(op, v=v, beta=beta)
        shapes.check_dtype(op, "beta", beta.dtype, calls.FLOATS)
        beta = beta.to(calls.wide(v.dtype)).sigmoid()
        beta = 2 * beta if allow_neg_eigval else beta
    return g, beta


def _decay_of(op: str, v: Any, g: Any, A_log: Any, dt_bias: Any) -> torch.Tensor:
    """-exp(A_log) softplus(g + dt_bias)."""
    given = {"A_log": A_log} if dt_bias is None else {"A_log": A_log, "dt_bias": dt_bias}
    shapes.check_tensors(op, v=v, g=g, **given)
    shapes.check_device(op, "v", v.device, g=g, **given)
    for name, x in {"g": g, **given}.items():
        shapes.check_dtype(op, name, x.dtype, calls.FLOATS)
    HV = v.shape[-2] if v.ndim > 1 else 0
    shapes.bind_shapes(op, v=((HV,), "HV"), **{name: (x, "HV") for name, x in given.items()})
    wide = calls.wide(v.dtype)
    raw = g.to(wide) if dt_bias is None else g.to(wide) + dt_bias.to(wide)
    return -A_log.to(wide).exp() * softplus(raw)


# ---- calls with all checks


def _called(
    op: str, q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, cu_seqlens: Any, *plain: Any
) -> tuple[torch.Tensor, State | None]:
    """plain: scale, qk_l2norm, output_final_state, backend."""
    if cu_seqlens is None and not _traced_by_dynamo():
        found = _passes.again(q, k, v, g, beta, initial_state, *plain)
        if found is not None:
            return (found[0], found[1]) if plain[2] else (found, None)
    *said, backend = plain
    inputs, opt = _bind(op, q, k, v, g, beta, *said, initial_state=initial_state, cu_seqlens=cu_seqlens)

    def remember(choice: Choice, outputs: Sequence[Any]) -> None:
        if cu_seqlens is None and calls.same(inputs[:5], (q, k, v, g, beta)):
            _passes.served(choice.backend, q.shape, plain, lambda: choice.runner.call(inputs, opt, outputs))

    o, state = apply.apply(OP, _problem(inputs), inputs, cu_seqlens, opt, backend, remember, op)
    if o.dtype != v.dtype and calls.autocast_dtype(v) is None:
        o = o.to(v.dtype)
    return o, state


def _stepped(
    op: str, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, slots: Any, out: Any, *plain: Any
) -> torch.Tensor:
    """plain: scale, qk_l2norm, backend."""
    if not _traced_by_dynamo():
        o = _steps.again(q, k, v, g, beta, state, slots, out, *plain)
        if o is not None:
            return o
    scale, qk_l2norm, backend = plain
    tokens, opt = _bind_decode(op, q, k, v, g, beta, state, scale, qk_l2norm, slots=slots, out=out)
    o = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
    if apply.traced(*tokens[:3], state):
        torch.ops.linattn_tl.delta_rule_decode(*tokens, state, o, slots, opt.scale, opt.qk_l2norm, backend)
        return o
    if out is not None:
        calls.check_out(op, out, state=state)
    choice = calls.step(DECODE_OP, tokens, {"state": state}, slots, opt, o, backend, op)
    if choice.backend in registry.COMPILED and calls.same(tokens, (q, k, v, g, beta)):
        _steps.served(choice.backend, q.shape, plain, lambda: choice.runner.call(*tokens, state, slots, opt, o))
    return o


# ---- checks


def _bind(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None = None,
    qk_l2norm: bool = False,
    output_final_state: bool = False,
    initial_state: Any = None,
    cu_seqlens: Any = None,
) -> tuple[tuple[Any, ...], Options]:
    """Every check that needs no values; returns the differentiable inputs and the options."""
    n, tokens, opt = _bind_tokens(op, "B T", q, k, v, g, beta, scale, qk_l2norm, output_final_state)
    N = n["B"] if cu_seqlens is None else calls.bind_lengths(op, cu_seqlens, q)
    if initial_state is not None:
        calls.check_kv(op, "initial_state", initial_state, {**n, "N": N}, "N", tokens[0])
    return (*tokens, initial_state), opt


def _bind_decode(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    state: Any,
    scale: float | None = None,
    qk_l2norm: bool = False,
    slots: Any = None,
    out: Any = None,
) -> tuple[tuple[Any, ...], Options]:
    shapes.check_tensors(op, q=q)
    n, tokens, opt = _bind_tokens(op, "B" if q.ndim == 3 else "B n", q, k, v, g, beta, scale, qk_l2norm, True)
    if out is not None:
        calls.bind_out(op, out, v)
    rows = n["B"]
    if slots is not None:
        calls.bind_slots(op, slots, q)
        rows = state.shape[0] if isinstance(state, torch.Tensor) and state.ndim else rows
    calls.refuse_transforms(op, op.removesuffix("_decode"))
    calls.check_kv(op, "state", state, {**n, "P": rows}, "P", tokens[0])
    calls.refuse_gradients(op, q=q, k=k, v=v, g=g, beta=beta, state=state, out=out)
    return tokens, opt


def _bind_tokens(
    op: str, lead: str, q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any, qk_l2norm: bool, final: bool
) -> tuple[dict[str, int], tuple[Any, ...], Options]:
    """Sizes, (q, k, v, g or None, beta) in their dtypes, options."""
    gates = {"beta": beta} if g is None else {"g": g, "beta": beta}
    shapes.check_tensors(op, q=q, k=k, v=v, **gates)
    shapes.check_device(op, "q", q.device, k=k, v=v, **gates)
    known = _known.__wrapped__ if torch.compiler.is_compiling() else _known
    n, dtype, opt = known(
        op, lead, q.shape, k.shape, v.shape, None if g is None else g.shape, beta.shape, q.dtype, k.dtype, v.dtype,
        calls.autocast_dtype(q), scale, bool(qk_l2norm), bool(final),
    )  # fmt: skip
    for name, x in gates.items():
        shapes.check_dtype(op, name, x.dtype, calls.FLOATS)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    wide = calls.wide(q.dtype)
    return n, (q, k, v, None if g is None else g.to(wide), beta.to(wide)), opt


@lru_cache(maxsize=1024)
def _known(
    op: str, lead: str, q: Any, k: Any, v: Any, g: Any, beta: Any, q_dtype: Any, k_dtype: Any, v_dtype: Any,
    autocast: Any, scale: Any, qk_l2norm: bool, final: bool,
) -> tuple[dict[str, int], Any, Options]:  # fmt: skip
    """What shapes, dtypes and plain arguments say: sizes, the dtype to cast q, k and v to or None, the options.

    Remembered, since a model calls with few of them, many times.
    """
    letters = {"q": "H K", "k": "H K", "v": "HV V", "g": "HV", "beta": "HV"}
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    n = shapes.bind_shapes(op, **{name: (x, f"{lead} {letters[name]}") for name, x in given.items() if x is not None})
    shapes.check_heads(op, n["H"], n["HV"])
    dtype = calls.common_dtype(op, (q_dtype, k_dtype, v_dtype), autocast)
    if not isinstance(scale, int | float) and scale is not None:
        raise TypeError(f"{op}: scale is {type(scale).__name__}; expected a number")
    return n, dtype, Options(max(n["K"], 1) ** -0.5 if scale is None else float(scale), qk_l2norm, final)


def _check_values(inputs: Sequence[Any], lengths: Any, op: str = NAME) -> None:
    if lengths is not None:
        shapes.check_lengths(op, lengths, inputs[0].shape[1])


_OF_GATES = ("A_log", "dt_bias", "beta_is_logit", "allow_neg_eigval")


def _form(call: Callable[..., Any], bind: Callable[..., Any]) -> Callable[..., Problem]:
    """What binds the arguments of a public function."""

    def problem(*args: Any, **kwargs: Any) -> Problem:
        given = signature(call).bind(*args, **kwargs)
        given.apply_defaults()
        said = {name: x for name, x in given.arguments.items() if name != "backend"}
        of_gates = [said.pop(name, None) for name in _OF_GATES]
        said["g"], said["beta"] = _gates(call.__name__, said["v"], said.get("g"), said["beta"], *of_gates)
        return _problem(bind(call.__name__, **said)[0], DECODE if bind is _bind_decode else NAME)

    return problem


def _library_step(
    q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, out: Any, slots: Any, scale: float, norm: bool, backend: str
) -> None:
    opt = Options(scale, norm, output_final_state=True)
    calls.step(DECODE_OP, (q, k, v, g, beta), {"state": state}, slots, opt, out, backend)


# ---- what the house needs to know


def _problem(inputs: Sequence[Any], op: str = NAME) -> Problem:
    return calls.problem_of(op, inputs[0], inputs[2])


def _meta(inputs: Sequence[Any], lengths: Any, opt: Options) -> tuple[Any, ...]:
    """Empty o and final state, with None for one that forward leaves out."""
    q, v = inputs[0], inputs[2]
    N = q.shape[0] if lengths is None else lengths.shape[0] - 1
    o = v.new_empty(v.shape)
    state = v.new_empty(N, v.shape[2], q.shape[3], v.shape[3], dtype=calls.wide(q.dtype))
    return o, state if opt.output_final_state else None


_CUDA_PASSES = cuda_kernels.PASSES
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
    call=gated_delta_rule,
    bind=_form(delta_rule, _bind),
    impls=with_cupy(loader.impls(_PASSES, TorchRunner), ArrayRunner),
    compiled=_PASSES,
    forms={"gated_delta_rule": _form(gated_delta_rule, _bind)},
    autograd=Autograd(
        inputs=("q", "k", "v", "g", "beta", "initial_state"),
        required=frozenset({"q", "k", "v", "beta"}),
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
    call=gated_delta_rule_decode,
    bind=_form(delta_rule_decode, _bind_decode),
    impls=with_cupy(loader.impls(_STEPS, lambda: decode), ArrayDecode),
    compiled=_STEPS,
    forms={"gated_delta_rule_decode": _form(gated_delta_rule_decode, _bind_decode)},
)
OPS = (OP, DECODE_OP)
apply.register(OP)
apply.register_inplace(
    DECODE,
    "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor(a!) state, Tensor(b!) out, Tensor? slots, "
    "float scale, bool qk_l2norm, str backend) -> ()",
    _library_step,
)
