"""Linear attention's rows in the conformance table."""

from typing import Any

import torch
from torch.nn.functional import relu

from linattn_tl import linear_attention, linear_attention_decode
from linattn_tl.ops.linear_attention.definition import FEATURE_MAPS, Options, TorchRunner, recurrent
from tests.conformance import (
    BACKENDS,
    Case,
    Subject,
    Tensors,
    decode_cases,
    generator,
    index_of,
    relayout,
    sequence_cases,
)

DEFINITION = TorchRunner(recurrent)


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x + 0.1


def both_signs(x: torch.Tensor) -> torch.Tensor:
    """Widens K twice."""
    return torch.cat([relu(x), relu(-x)], -1)


def options_of(case: Case) -> tuple[Options, Any]:
    """Options of the definition, and the callable that goes before it, if any."""
    said = {"feature_map": "elu1", **case.keywords}
    phi = said["feature_map"]
    width = case.K if isinstance(phi, str) else phi(torch.zeros(case.K)).shape[-1]
    if said.get("scale", 1.0) is None:
        said["scale"] = width**-0.5
    if not isinstance(phi, str):
        return Options(**{**said, "feature_map": "identity"}, output_final_state=True), phi
    return Options(**said, output_final_state=True), None


def inputs(case: Case) -> Tensors:
    g, dtype = generator(case), getattr(torch, case.dtype)
    wide = torch.promote_types(dtype, torch.float32)

    def new(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g)

    T_k = case.T if case.T_k is None else case.T_k
    tokens = {
        "q": new(case.B, case.T, case.H, case.K).to(dtype),
        "k": new(case.B, T_k, case.H, case.K).to(dtype),
        "v": new(case.B, T_k, case.HV, case.V).to(dtype),
    }
    if not case.state:
        return tokens
    return {**tokens, **states(case, case.N, new, wide)}


def states(case: Case, rows: int, new: Any, wide: torch.dtype) -> Tensors:
    phi = options_of(case)[1]
    K = case.K if phi is None else phi(torch.zeros(case.K)).shape[-1]
    return {
        "kv": new(rows, case.HV, K, case.V).to(wide),
        "z": (new(rows, case.H, K).abs() * 3).to(wide),
    }


def call(t: Tensors, case: Case, backend: str) -> Tensors:
    o, final = linear_attention(
        t["q"],
        t["k"],
        t["v"],
        initial_state=(t["kv"], t["z"]) if "kv" in t else None,
        output_final_state=case.final,
        cu_seqlens=index_of(case, case.cu),
        backend=backend,
        **case.keywords,
    )
    assert (final is not None) == case.final
    return {"o": o, "kv": final.kv, "z": final.z} if case.final else {"o": o}


def truth(t: Tensors, case: Case) -> Tensors:
    opt, phi = options_of(case)
    q, k = (t["q"], t["k"]) if phi is None else (phi(t["q"]), phi(t["k"]))
    (o, kv, z), _ = DEFINITION.forward((q, k, t["v"], t.get("kv"), t.get("z")), index_of(case, case.cu), opt)
    return {"o": o, "kv": kv, "z": z} if case.final else {"o": o}


def step(token: Tensors, state: Tensors, case: Case, backend: str) -> torch.Tensor:
    pair = (state["kv"], state["z"])
    return linear_attention_decode(token["q"], token["k"], token["v"], pair, backend=backend, **case.keywords)


# ---- decode


def decode_inputs(case: Case) -> Tensors:
    """Tokens and the pool; two rows of it belong to nobody where slots are given."""
    g = generator(case, "pool")
    rows = case.B if case.slots is None else case.B + 2
    wide = torch.promote_types(getattr(torch, case.dtype), torch.float32)
    pool = states(case, rows, lambda *size: torch.randn(*size, generator=g), wide)
    return {**inputs(case), **pool}


def decode_call(t: Tensors, case: Case, backend: str) -> Tensors:
    pick = (lambda x: x[:, 0]) if case.single else (lambda x: x)
    out = torch.full_like(pick(t["v"]), float("nan"), memory_format=torch.contiguous_format)
    if case.layout in ("heads-first", "column", "every-second"):
        out = relayout({"o": out}, ("o",), case.layout)["o"]
    kv, z = t["kv"].clone(), t["z"].clone()
    slots = index_of(case, case.slots)
    o = linear_attention_decode(
        *(pick(t[n]) for n in "qkv"), (kv, z), slots=slots, out=out, backend=backend, **case.keywords
    )
    assert o is out
    for row in set(range(kv.shape[0])) - set(range(case.B) if slots is None else case.slots):
        assert torch.equal(kv[row], t["kv"][row]), f"row {row} of the pool belongs to nobody and changed"
        assert torch.equal(z[row], t["z"][row]), f"row {row} of the pool belongs to nobody and changed"
    return {"o": o.unsqueeze(1) if case.single else o, "kv": kv, "z": z}


def decode_truth(t: Tensors, case: Case) -> Tensors:
    opt, phi = options_of(case)
    kv, z, o = t["kv"].clone(), t["z"].clone(), torch.zeros_like(t["v"])
    for i, row in enumerate(range(case.B) if case.slots is None else case.slots):
        if row < 0:
            continue
        q, k, v = (t[n][i : i + 1] for n in "qkv")
        q, k = (q, k) if phi is None else (phi(q), phi(k))
        o[i : i + 1], kv[row : row + 1], z[row : row + 1], _ = recurrent(
            q, k, v, kv[row : row + 1], z[row : row + 1], opt
        )
    return {"o": o, "kv": kv, "z": z}


OPTIONS: dict[str, tuple[tuple[str, Any], ...]] = {
    **{name: (("feature_map", name), ("normalize", name == "elu1"), ("scale", None)) for name in FEATURE_MAPS},
    "relu-normalized": (("feature_map", "relu"), ("eps", 0.1)),
    "callable": (("feature_map", square),),
    "callable-wider": (("feature_map", both_signs), ("scale", None), ("eps", 0.1)),
    "not-normalized": (("normalize", False), ("scale", 0.3)),
    "scale-eps": (("scale", 0.3), ("eps", 0.5)),
}
NONCAUSAL = (("causal", False),)

SUBJECTS = (
    Subject(
        op="linear_attention",
        inputs=inputs,
        call=call,
        truth=truth,
        states=("kv", "z"),
        step=step,
        cases=(
            *sequence_cases(),
            Case("K1-V1", K=1, V=1, state=True, final=True, options=(("eps", 0.5),)),  # K = 1: all is in eps
            Case("K1-V1-negated", K=1, V=1, layout="negated", options=(("eps", 0.5),)),
            *(Case(i, T=70, state=True, final=True, options=o, backends=BACKENDS) for i, o in OPTIONS.items()),
            *(Case(f"{i}-alone", T=70, options=o) for i, o in OPTIONS.items()),
            *(Case(f"full-{i}", T=40, state=True, final=True, options=o + NONCAUSAL) for i, o in OPTIONS.items()),
            *(Case(f"full-T{t}", B=1, T=t, state=True, final=True, options=NONCAUSAL) for t in (0, 1, 64, 1000)),
            Case("full-one-head", B=1, T=1100, H=1, HV=1, K=64, V=64, state=True, final=True, options=NONCAUSAL),
            *(Case(f"full-alone-HV{n}", HV=n, options=NONCAUSAL, backends=BACKENDS) for n in (2, 6)),
            *(
                Case(f"cross-{a}-{b}", T=a, T_k=b, state=a > 0, final=a < b, options=NONCAUSAL, V=24)
                for a, b in ((33, 70), (70, 33), (1, 65), (65, 1), (0, 5), (1000, 40))
            ),
            Case("cross-no-keys", T=9, T_k=0, state=True, final=True, options=NONCAUSAL),
            Case("full-packed", B=1, T=72, cu=(0, 5, 5, 71, 72), HV=4, final=True, options=NONCAUSAL),
            *(
                Case(f"full-{d}", dtype=d, HV=4, state=True, final=True, options=NONCAUSAL)
                for d in ("bfloat16", "float16")
            ),
            Case("full-float64", dtype="float64", HV=4, options=NONCAUSAL, backends=("torch",)),
        ),
    ),
    Subject(
        op="linear_attention_decode",
        inputs=decode_inputs,
        call=decode_call,
        truth=decode_truth,
        states=("kv", "z"),
        differentiable=False,
        cases=(*decode_cases(), *(Case(i, T=3, options=o) for i, o in OPTIONS.items())),
    ),
)
