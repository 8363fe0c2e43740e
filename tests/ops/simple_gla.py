"""The scalar-gated family's rows in the conformance table."""

from typing import Any

import torch

from linattn_tl.ops.simple_gla import simple_gla, simple_gla_decode
from linattn_tl.ops.simple_gla.definition import Options, TorchRunner, recurrent
from tests.conformance import (
    BACKENDS,
    DTYPES,
    GATES,
    Case,
    Subject,
    Tensors,
    decode_cases,
    gates,
    generator,
    index_of,
    relayout,
    sequence_cases,
)

DEFINITION = TorchRunner(recurrent)


def options_of(case: Case) -> tuple[Options, str]:
    said = {"scale": None, "gates": "near", **case.keywords}
    scale = case.K**-0.5 if said["scale"] is None else said["scale"]
    return Options(scale, output_final_state=True), said["gates"]


def keywords(case: Case) -> dict[str, Any]:
    return {name: x for name, x in case.keywords.items() if name != "gates"}


def inputs(case: Case) -> Tensors:
    r, dtype = generator(case), getattr(torch, case.dtype)
    wide = torch.promote_types(dtype, torch.float32)

    def new(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=r)

    tokens = {
        "q": new(case.B, case.T, case.H, case.K).to(dtype),
        "k": new(case.B, case.T, case.H, case.K).to(dtype),
        "v": new(case.B, case.T, case.HV, case.V).to(dtype),
        "g": gates(options_of(case)[1], (case.B, case.T, case.HV), r).to(wide),
    }
    return {**tokens, "state": new(case.N, case.HV, case.K, case.V).to(wide)} if case.state else tokens


def call(t: Tensors, case: Case, backend: str) -> Tensors:
    o, final = simple_gla(
        *(t[name] for name in "qkvg"),
        initial_state=t.get("state"),
        output_final_state=case.final,
        cu_seqlens=index_of(case, case.cu),
        backend=backend,
        **keywords(case),
    )
    assert (final is not None) == case.final
    return {"o": o} if final is None else {"o": o, "state": final}


def truth(t: Tensors, case: Case) -> Tensors:
    tokens = tuple(t[name] for name in "qkvg")
    (o, state), _ = DEFINITION.forward((*tokens, t.get("state")), index_of(case, case.cu), options_of(case)[0])
    return {"o": o, "state": state} if case.final else {"o": o}


def step(token: Tensors, state: Tensors, case: Case, backend: str) -> torch.Tensor:
    return simple_gla_decode(*(token[name] for name in "qkvg"), state["state"], backend=backend, **keywords(case))


# ---- decode


def decode_inputs(case: Case) -> Tensors:
    """Tokens and the pool; two rows of it belong to nobody where slots are given."""
    rows = case.B if case.slots is None else case.B + 2
    wide = torch.promote_types(getattr(torch, case.dtype), torch.float32)
    pool = torch.randn(rows, case.HV, case.K, case.V, generator=generator(case, "pool")).to(wide)
    return {**inputs(case), "state": pool}


def decode_call(t: Tensors, case: Case, backend: str) -> Tensors:
    pick = (lambda x: x[:, 0]) if case.single else (lambda x: x)
    out = torch.full_like(pick(t["v"]), float("nan"), memory_format=torch.contiguous_format)
    if case.layout in ("heads-first", "column", "every-second"):
        out = relayout({"o": out}, ("o",), case.layout)["o"]
    state, slots = t["state"].clone(), index_of(case, case.slots)
    tokens = (pick(t[name]) for name in "qkvg")
    o = simple_gla_decode(*tokens, state, slots=slots, out=out, backend=backend, **keywords(case))
    assert o is out
    for row in set(range(state.shape[0])) - set(range(case.B) if slots is None else case.slots):
        assert torch.equal(state[row], t["state"][row]), f"row {row} of the pool belongs to nobody and changed"
    return {"o": o.unsqueeze(1) if case.single else o, "state": state}


def decode_truth(t: Tensors, case: Case) -> Tensors:
    state, o = t["state"].clone(), torch.zeros_like(t["v"])
    for i, row in enumerate(range(case.B) if case.slots is None else case.slots):
        if row >= 0:
            tokens = (t[name][i : i + 1] for name in "qkvg")
            o[i : i + 1], state[row : row + 1] = recurrent(*tokens, state[row : row + 1], options_of(case)[0])
    return {"o": o, "state": state}


OPTIONS: dict[str, tuple[tuple[str, Any], ...]] = {
    **{f"decay-{kind}": (("gates", kind),) for kind in GATES},
    "scale": (("scale", 0.3),),
}

SUBJECTS = (
    Subject(
        op="simple_gla",
        inputs=inputs,
        call=call,
        truth=truth,
        tokens=("q", "k", "v", "g"),
        states=("state",),
        step=step,
        cases=(
            *sequence_cases(),
            Case("K1-V1", K=1, V=1, state=True, final=True),
            *(Case(i, T=70, HV=4, state=True, final=True, options=o, backends=BACKENDS) for i, o in OPTIONS.items()),
            *(Case(f"{i}-alone", T=70, options=o) for i, o in OPTIONS.items()),
            *(
                Case(f"{i}-{d}", T=70, state=True, final=True, options=o, dtype=d)
                for d in DTYPES[1:]
                for i, o in OPTIONS.items()
            ),
            *(
                Case(
                    f"one-head-{k}", B=1, T=1100, H=1, HV=1, K=64, V=64, state=True, final=True, options=(("gates", k),)
                )
                for k in GATES
            ),
        ),
    ),
    Subject(
        op="simple_gla_decode",
        inputs=decode_inputs,
        call=decode_call,
        truth=decode_truth,
        tokens=("q", "k", "v", "g"),
        states=("state",),
        differentiable=False,
        cases=(*decode_cases(), *(Case(i, T=3, options=o) for i, o in OPTIONS.items())),
    ),
)
