"""Linear attention with a feature map and a normaliser, "Transformers are RNNs" (arXiv 2006.16236).

    S_t = S_{t-1} + phi(k_t) v_t^T        z_t = z_{t-1} + phi(k_t)                             (eq. 16-18)
    o_t = scale phi(q_t)^T S_t / (scale phi(q_t) . z_t + eps)                                  (eq. 19-20)

phi(x) = elu(x) + 1 by default (eq. 7). The state is fp32 whatever the inputs are: a bf16 running sum of keys stops
growing within a thousand tokens.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from linattn_tl import apply, calls, loader, registry, shapes
from linattn_tl.arrays import with_cupy
from linattn_tl.ops.linear_attention.again import PASS, STEP
from linattn_tl.ops.linear_attention.arrays import ArrayDecode, ArrayRunner
from linattn_tl.ops.linear_attention.cpu import CpuDecode, CpuRunner
from linattn_tl.ops.linear_attention.cuda import CudaDecode, CudaRunner
from linattn_tl.ops.linear_attention.definition import FEATURE_MAPS, Options, TorchRunner, decode
from linattn_tl.registry import Autograd, Choice, Compiled, Op
from linattn_tl.repeats import Repeats
from linattn_tl.spans import refuse_sizes, serving
from tl_kernels.linear_attention import cpu as kernels
from tl_kernels.linear_attention import cuda as cuda_kernels
from tl_kernels.linear_attention import cuda_decode
from tl_kernels.spec import Problem

__all__ = ["LinearState", "linear_attention", "linear_attention_decode"]

NAME, DECODE = "linear_attention", "linear_attention_decode"
_traced_by_dynamo = torch.compiler.is_dynamo_compiling
_passes, _steps = Repeats(NAME, PASS), Repeats(DECODE, STEP)
FeatureMap = str | Callable[[torch.Tensor], torch.Tensor]


class LinearState(NamedTuple):
    """The constant-size state: kv [N, HV, K, V] and the running sum of keys z [N, H, K], both fp32."""

    kv: torch.Tensor
    z: torch.Tensor


def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    feature_map: FeatureMap = "elu1",
    causal: bool = True,
    normalize: bool = True,
    scale: float | None = 1.0,
    eps: float = 1e-6,
    initial_state: LinearState | tuple[torch.Tensor, torch.Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, LinearState | None]:
    """Linear attention over whole sequences.

        S_t = S_{t-1} + phi(k_t) v_t^T        z_t = z_{t-1} + phi(k_t)
        o_t = scale phi(q_t)^T S_t / (scale phi(q_t) . z_t + eps)

    Non-causal, every query sees the state after the last key.

    Args:
        q: [B, T, H, K] queries, float32, bfloat16, float16 or float64; any strides.
        k: [B, T, H, K] keys; [B, T_k, H, K] when causal is False.
        v: [B, T, HV, V] values, HV a multiple of H: q/k head h serves value heads h * HV/H and those up to the next.
        feature_map: phi: "elu1" (elu(x) + 1), "relu", "identity", or a callable, applied to q and k beforehand.
        causal: whether token t sees only tokens up to t.
        normalize: divide by the sum of weights. The sum is kept in fp32.
        scale: multiplies phi(q); None means K ** -0.5. With the normaliser it only weighs eps.
        eps: added to the normaliser.
        initial_state: (kv [N, HV, K, V], z [N, H, K]), fp32, N sequences; zeros when None.
        output_final_state: also return the state after the last token.
        cu_seqlens: int32 or int64 [N + 1], 0 first, T last: packs N sequences along T, with B = 1; one may be empty. On
            a GPU the first call with a tensor waits to check its values, calls after it do not; nor does one that is
            captured into a graph, whose values are the caller's to keep right.
        backend: "auto", or one of "binary", "jit", "cupy", "torch", which then never falls back.

    Returns:
        (o [B, T, HV, V] in v's dtype, LinearState or None). Differentiable in q, k, v and the initial state, through
        o and the final state; more than once through the torch definition.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, size, dtype, device or value; the text names it.
        UnsupportedError: a named backend cannot serve the call, or none can with LINATTN_TL_STRICT=1.

    Under torch.autocast, q, k and v are cast to the autocast dtype; otherwise mixed dtypes are promoted.

    Source: Katharopoulos et al. 2020, arXiv 2006.16236, eq. 4-12 and 16-20.
    """
    plain = feature_map, causal, normalize, scale, eps, output_final_state, backend
    if cu_seqlens is None and not _traced_by_dynamo():
        found = _passes.again(q, k, v, initial_state, *plain)
        if found is not None:
            return (found[0], LinearState(*found[1:])) if output_final_state else (found, None)
    return _pass(q, k, v, initial_state, cu_seqlens, *plain)


def linear_attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: LinearState | tuple[torch.Tensor, torch.Tensor],
    *,
    feature_map: FeatureMap = "elu1",
    normalize: bool = True,
    scale: float | None = 1.0,
    eps: float = 1e-6,
    slots: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """One token, or a few, a sequence: reads and updates the state in place, causally.

        S += phi(k) v^T        z += phi(k)        o = scale phi(q)^T S / (scale phi(q) . z + eps)

    Args:
        q: [B, H, K], or [B, n, H, K] for n tokens one after the other; k likewise.
        v: [B, HV, V] or [B, n, HV, V].
        state: (kv [P, HV, K, V], z [P, H, K]), fp32, changed in place; a new row is all zeros. P = B without slots.
        feature_map, normalize, scale, eps: as in linear_attention.
        slots: int32 or int64 [B], the row of the pool of each sequence, no row twice; -1 is padding: its o is 0 and no
            state is touched. Compiled kernels on a GPU do not wait to look at them first: a row that the pool has not
            got makes o NaN and touches no state, and naming one twice is not noticed.
        out: a tensor like v to write o to.
        backend: "auto", or one of "binary", "jit", "cupy", "torch".

    Returns:
        o, shaped and typed like v (`out`, if it was given).

    Raises:
        ValueError, TypeError: as in linear_attention, also for tensors that require a gradient while gradients are
            recorded: an in-place step has none.

    Source: Katharopoulos et al. 2020, arXiv 2006.16236, eq. 16-20.
    """
    if not _traced_by_dynamo():
        o = _steps.again(q, k, v, state, slots, out, feature_map, normalize, scale, eps, backend)
        if o is not None:
            return o
    return _step(q, k, v, state, slots, out, feature_map, normalize, scale, eps, backend)


# ---- calls with all checks


def _pass(q: Any, k: Any, v: Any, initial_state: Any, cu_seqlens: Any, *plain: Any) -> tuple[Any, LinearState | None]:
    """linear_attention; plain as its repeats have it."""
    feature_map, causal, normalize, scale, eps, output_final_state, backend = plain
    inputs, opt = _bind(
        q, k, v, feature_map, causal, normalize, scale, eps, initial_state, output_final_state, cu_seqlens
    )

    def remember(choice: Choice, outputs: Sequence[Any]) -> None:
        if cu_seqlens is None and calls.same(inputs[:3], (q, k, v)):
            _passes.served(choice.backend, q.shape, plain, lambda: choice.runner.call(inputs, opt, outputs))

    o, kv, z = apply.apply(OP, _problem(inputs), inputs, cu_seqlens, opt, backend, remember)
    if o.dtype != v.dtype and calls.autocast_dtype(v) is None:
        o = o.to(v.dtype)
    return o, None if kv is None else LinearState(kv, z)


def _step(q: Any, k: Any, v: Any, state: Any, slots: Any, out: Any, *plain: Any) -> torch.Tensor:
    """linear_attention_decode; plain as its repeats have it."""
    feature_map, normalize, scale, eps, backend = plain
    tokens, opt, kv, z = _bind_decode(q, k, v, state, feature_map, normalize, scale, eps, slots, out)
    o = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
    if apply.traced(q, k, v, kv, z):
        torch.ops.linattn_tl.linear_attention_decode(*tokens, kv, z, o, slots, *opt[:5], backend)
        return o
    if out is not None:
        calls.check_out(DECODE, out, **{"state.kv": kv, "state.z": z})
    choice = calls.step(DECODE_OP, tokens, {"state.kv": kv, "state.z": z}, slots, opt, o, backend)
    if choice.backend in registry.COMPILED and calls.same(tokens, (q, k, v)):
        _steps.served(choice.backend, q.shape, plain, lambda: choice.runner.call(*tokens, kv, z, slots, opt, o))
    return o


# ---- checks


def _features(op: str, q: Any, k: Any, feature_map: Any) -> tuple[Any, Any, str]:
    """q and k through a callable, outside the kernel, and the name of what is left to apply."""
    if not callable(feature_map):
        raise TypeError(f"{op}: feature_map is {type(feature_map).__name__}; expected a string or a callable")
    mapped: tuple[Any, Any] = feature_map(q), feature_map(k)
    for name, x, y in (("q", q, mapped[0]), ("k", k, mapped[1])):
        if not isinstance(y, torch.Tensor):
            raise TypeError(f"{op}: feature_map made {type(y).__name__} of {name}; expected a tensor")
        want = (*x.shape[:-1], mapped[0].shape[-1] if mapped[0].ndim else 0)
        if tuple(y.shape) != want or y.device != x.device:
            raise ValueError(
                f"{op}: feature_map made {tuple(y.shape)} on {y.device} of {name} {tuple(x.shape)}; expected the same "
                f"shape but for the last size, which q and k share, on {x.device}"
            )
    return *mapped, "identity"


def _check_feature_map(op: str, name: str) -> None:
    if name not in FEATURE_MAPS:
        raise ValueError(f"{op}: feature_map is {name!r}; expected {', '.join(FEATURE_MAPS)} or a callable")


def _check_state(op: str, name: str, state: Any, n: dict[str, int], letter: str, q: torch.Tensor) -> tuple[Any, Any]:
    """(kv, z) of a state, checked against the sizes bound so far."""
    if not isinstance(state, tuple) or len(state) != 2:
        raise TypeError(f"{op}: {name} is {type(state).__name__}; expected LinearState or a (kv, z) tuple")
    kv, z = state
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows, H, HV, K, V = n[letter], n["H"], n["HV"], n["K"], n["V"]
    if isinstance(kv, torch.Tensor) and isinstance(z, torch.Tensor):
        fits = kv.shape == (rows, HV, K, V) and z.shape == (rows, H, K) and kv.dtype == z.dtype == wide
        if fits and kv.device == z.device == q.device:
            return kv, z
    sizes = [(name + ".kv", kv, (letter, "HV", "K", "V")), (name + ".z", z, (letter, "H", "K"))]
    for part, x, letters in sizes:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{op}: {part} is {type(x).__name__}; expected a tensor [{', '.join(letters)}]")
        expected = tuple(n[letter] for letter in letters)
        if tuple(x.shape) != expected:
            raise ValueError(f"{op}: {part} has shape {tuple(x.shape)}; expected [{', '.join(letters)}] = {expected}")
        shapes.check_dtype(op, part, x.dtype, (wide,))
        shapes.check_device(op, "q", q.device, **{part: x})
    return kv, z


def _options(
    op: str, phi: str, causal: bool, normalize: bool, scale: float | None, eps: float, K: int, final: bool
) -> Options:
    """The plain arguments. A tensor is refused where a number is expected: its gradient would be lost."""
    for name, x in (("scale", scale), ("eps", eps)):
        if not isinstance(x, int | float) and not (x is None and name == "scale"):
            raise TypeError(f"{op}: {name} is {type(x).__name__}; expected a number")
    return Options(phi, bool(causal), bool(normalize), K**-0.5 if scale is None else float(scale), float(eps), final)


def _bind(
    q: Any,
    k: Any,
    v: Any,
    feature_map: FeatureMap = "elu1",
    causal: bool = True,
    normalize: bool = True,
    scale: float | None = 1.0,
    eps: float = 1e-6,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
) -> tuple[tuple[Any, ...], Options]:
    """Every check that needs no values; returns the differentiable inputs and the options."""
    shapes.check_tensors(NAME, q=q, k=k, v=v)
    if not q.device == k.device == v.device:
        shapes.check_device(NAME, "q", q.device, k=k, v=v)
    plain = (causal, normalize, scale, eps, output_final_state)
    known = _known.__wrapped__ if torch.compiler.is_compiling() else _known
    if not isinstance(feature_map, str):
        known(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, None, "identity", *plain)
        q, k, feature_map = _features(NAME, q, k, feature_map)
    (B, T, T_k, H, HV), dtype, opt = known(
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, calls.autocast_dtype(q), feature_map, *plain
    )
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    K, N = q.shape[-1], B
    if cu_seqlens is not None:
        N = calls.bind_lengths(NAME, cu_seqlens, q)
        if T_k != T:
            raise ValueError(f"{NAME}: k has T_k = {T_k} with cu_seqlens; expected T = {T} (T from q)")
    kv = z = None
    if initial_state is not None:
        n = {"N": N, "H": H, "HV": HV, "K": K, "V": v.shape[-1]}
        kv, z = _check_state(NAME, "initial_state", initial_state, n, "N", q)
    return (q, k, v, kv, z), opt


@lru_cache(maxsize=1024)
def _known(
    q: Any, k: Any, v: Any, q_dtype: Any, k_dtype: Any, v_dtype: Any, autocast: Any, phi: str, causal: bool,
    normalize: bool, scale: Any, eps: Any, final: bool,
) -> tuple[tuple[int, int, int, int, int], Any, Options]:  # fmt: skip
    """What shapes, dtypes and plain arguments say: (B, T, T_k, H, HV), the dtype to cast to or None, the options.

    Remembered, since a model calls with few of them, many times.
    """
    n = shapes.bind_shapes(NAME, q=(q, "B T H K"), k=(k, f"B {'T' if causal else 'T_k'} H K"))
    n |= shapes.bind_shapes(NAME, k=(k, "B T_k H K"), v=(v, "B T_k HV V"))
    shapes.check_heads(NAME, n["H"], n["HV"])
    _check_feature_map(NAME, phi)
    dtype = calls.common_dtype(NAME, (q_dtype, k_dtype, v_dtype), autocast)
    opt = _options(NAME, phi, causal, normalize, scale, eps, n["K"], bool(final))
    return (n["B"], n["T"], n["T_k"], n["H"], n["HV"]), dtype, opt


def _check_values(inputs: Sequence[Any], lengths: Any, op: str = NAME) -> None:
    if lengths is not None:
        shapes.check_lengths(op, lengths, inputs[0].shape[1])


def _bind_decode(
    q: Any,
    k: Any,
    v: Any,
    state: Any,
    feature_map: FeatureMap = "elu1",
    normalize: bool = True,
    scale: float | None = 1.0,
    eps: float = 1e-6,
    slots: Any = None,
    out: Any = None,
) -> tuple[tuple[Any, Any, Any], Options, Any, Any]:
    shapes.check_tensors(DECODE, q=q, k=k, v=v)
    if not q.device == k.device == v.device:
        shapes.check_device(DECODE, "q", q.device, k=k, v=v)
    plain = (normalize, scale, eps)
    known = _decode_known.__wrapped__ if torch.compiler.is_compiling() else _decode_known
    if not isinstance(feature_map, str):
        known(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, None, "identity", *plain)
        q, k, feature_map = _features(DECODE, q, k, feature_map)
    (B, H, HV), dtype, opt = known(
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, calls.autocast_dtype(q), feature_map, *plain
    )
    if out is not None:
        calls.bind_out(DECODE, out, v)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    n = {"P": B, "H": H, "HV": HV, "K": q.shape[-1], "V": v.shape[-1]}
    if slots is not None:
        calls.bind_slots(DECODE, slots, q)
        pool = state[0] if isinstance(state, tuple) and state else None
        n["P"] = pool.shape[0] if isinstance(pool, torch.Tensor) and pool.ndim else B
    calls.refuse_transforms(DECODE, NAME)
    kv, z = _check_state(DECODE, "state", state, n, "P", q)
    calls.refuse_gradients(DECODE, **{"q": q, "k": k, "v": v, "state.kv": kv, "state.z": z, "out": out})
    return (q, k, v), opt, kv, z


@lru_cache(maxsize=1024)
def _decode_known(
    q: Any, k: Any, v: Any, q_dtype: Any, k_dtype: Any, v_dtype: Any, autocast: Any, phi: str, normalize: bool,
    scale: Any, eps: Any,
) -> tuple[tuple[int, int, int], Any, Options]:  # fmt: skip
    """As _known: (B, H, HV), the dtype to cast to or None, the options."""
    letters = "B H K" if len(q) == 3 else "B n H K"
    n = shapes.bind_shapes(DECODE, q=(q, letters), k=(k, letters), v=(v, letters.replace("H K", "HV V")))
    shapes.check_heads(DECODE, n["H"], n["HV"])
    _check_feature_map(DECODE, phi)
    dtype = calls.common_dtype(DECODE, (q_dtype, k_dtype, v_dtype), autocast)
    return (n["B"], n["H"], n["HV"]), dtype, _options(DECODE, phi, True, normalize, scale, eps, n["K"], True)


def _library_step(q: Any, k: Any, v: Any, kv: Any, z: Any, out: Any, slots: Any, *rest: Any) -> None:
    opt = Options(*rest[:5], output_final_state=True)
    calls.step(DECODE_OP, (q, k, v), {"state.kv": kv, "state.z": z}, slots, opt, out, rest[5])


# ---- what the house needs to know


def _problem(inputs: Sequence[Any], op: str = NAME) -> Problem:
    return calls.problem_of(op, inputs[0], inputs[2])


def _meta(inputs: Sequence[Any], lengths: Any, opt: Options) -> tuple[Any, ...]:
    """Empty o, kv, z, den, total kv, total z, with None for those that forward leaves out."""
    q, _, v, _, _ = inputs
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if lengths is None else lengths.shape[0] - 1
    wide = torch.promote_types(q.dtype, torch.float32)
    kv, z = v.new_empty(N, HV, K, V, dtype=wide), v.new_empty(N, H, K, dtype=wide)
    o, den = v.new_empty(B, T, HV, V), q.new_empty(B, T, H, dtype=wide)
    final = (kv, z) if opt.output_final_state else (None, None)
    total = (None, None) if opt.causal or opt.output_final_state else (kv, z)
    return (o, *final, den, *total)


_CUDA_PASSES = tuple(k for k in cuda_kernels.KERNELS if k != cuda_decode.DECODE)


_TRIAL, _TRIAL_CUDA = f"{__name__}.trial", f"{__name__}.trial_cuda"
_PASSES = {
    "cpu": Compiled((kernels.FWD, kernels.BWD_Q, kernels.BWD_KV), lambda found, _: CpuRunner(found), _TRIAL),
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
    call=linear_attention,
    bind=lambda *args, backend="auto", **kwargs: _problem(_bind(*args, **kwargs)[0]),
    impls=with_cupy(loader.impls(_PASSES, TorchRunner), ArrayRunner),
    compiled=_PASSES,
    autograd=Autograd(
        inputs=("q", "k", "v", "initial_kv", "initial_z"),
        required=frozenset({"q", "k", "v"}),
        outputs=("o", "kv", "z"),
        saved=("den", "total_kv", "total_z"),
        options=Options,
        problem=_problem,
        check_values=_check_values,
        meta=_meta,
        wanted=lambda opt: (True, opt.output_final_state, opt.output_final_state),
        reference=TorchRunner(),
    ),
)
DECODE_OP = Op(
    name=DECODE,
    call=linear_attention_decode,
    bind=lambda *args, backend="auto", **kwargs: _problem(_bind_decode(*args, **kwargs)[0], DECODE),
    impls=with_cupy(loader.impls(_STEPS, lambda: decode), ArrayDecode),
    compiled=_STEPS,
)
OPS = (OP, DECODE_OP)
apply.register(OP)
apply.register_inplace(
    DECODE,
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) kv, Tensor(b!) z, Tensor(c!) out, Tensor? slots, str feature_map, "
    "bool causal, bool normalize, float scale, float eps, str backend) -> ()",
    _library_step,
)
