"""The delta rule's rows in the conformance table, gated and not."""

from functools import partial
from typing import Any

import torch

from linattn_tl.ops.delta_rule import delta_rule, delta_rule_decode, gated_delta_rule, gated_delta_rule_decode
from linattn_tl.ops.delta_rule.definition import Options, TorchRunner, chunked, normalized, recurrent
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
    said = {"scale": None, "gates": "near", "qk_l2norm": False, **case.keywords}
    scale = case.K**-0.5 if said["scale"] is None else said["scale"]
    return Options(scale, said["qk_l2norm"], output_final_state=True), said["gates"]


def keywords(case: Case) -> dict[str, Any]:
    return {name: x for name, x in case.keywords.items() if name != "gates"}


def inputs(case: Case) -> Tensors:
    """Keys of length 1, or any where the op normalises them; beta in [0, 2]; no g where there are no gates."""
    r, dtype = generator(case), getattr(torch, case.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    opt, kind = options_of(case)

    def new(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=r)

    k = new(case.B, case.T, case.H, case.K)
    tokens = {
        "q": new(case.B, case.T, case.H, case.K).to(dtype),
        "k": (k if opt.qk_l2norm else normalized(k)).to(dtype),
        "v": new(case.B, case.T, case.HV, case.V).to(dtype),
        "beta": (2 * torch.rand(case.B, case.T, case.HV, generator=r)).to(wide),
    }
    if kind != "none":
        tokens["g"] = gates(kind, (case.B, case.T, case.HV), r).to(wide)
    return {**tokens, "state": new(case.N, case.HV, case.K, case.V).to(wide)} if case.state else tokens


def arguments(t: Tensors) -> tuple[torch.Tensor, ...]:
    """Of the gated function, or of the one without gates."""
    return tuple(t[name] for name in ("q", "k", "v", "g", "beta") if name in t)


def of_definition(t: Tensors) -> tuple[Any, ...]:
    return tuple(t.get(name) for name in ("q", "k", "v", "g", "beta"))


def call(t: Tensors, case: Case, backend: str) -> Tensors:
    o, final = (gated_delta_rule if "g" in t else delta_rule)(
        *arguments(t),
        initial_state=t.get("state"),
        output_final_state=case.final,
        cu_seqlens=index_of(case, case.cu),
        backend=backend,
        **keywords(case),
    )
    assert (final is not None) == case.final
    return {"o": o} if final is None else {"o": o, "state": final}


def by(runner: TorchRunner, t: Tensors, case: Case) -> Tensors:
    (o, state), _ = runner.forward((*of_definition(t), t.get("state")), index_of(case, case.cu), options_of(case)[0])
    return {"o": o, "state": state} if case.final else {"o": o}


def step_one(token: Tensors, state: Tensors, case: Case, backend: str) -> torch.Tensor:
    step = gated_delta_rule_decode if "g" in token else delta_rule_decode
    return step(*arguments(token), state["state"], backend=backend, **keywords(case))


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
    step = gated_delta_rule_decode if "g" in t else delta_rule_decode
    o = step(*map(pick, arguments(t)), state, slots=slots, out=out, backend=backend, **keywords(case))
    assert o is out
    for row in set(range(state.shape[0])) - set(range(case.B) if slots is None else case.slots):
        assert torch.equal(state[row], t["state"][row]), f"row {row} of the pool belongs to nobody and changed"
    return {"o": o.unsqueeze(1) if case.single else o, "state": state}


def decode_truth(t: Tensors, case: Case) -> Tensors:
    state, o = t["state"].clone(), torch.zeros_like(t["v"])
    for i, row in enumerate(range(case.B) if case.slots is None else case.slots):
        if row >= 0:
            tokens = (None if x is None else x[i : i + 1] for x in of_definition(t))
            o[i : i + 1], state[row : row + 1] = recurrent(*tokens, state[row : row + 1], options_of(case)[0])
    return {"o": o, "state": state}


OPTIONS: dict[str, tuple[tuple[str, Any], ...]] = {
    **{f"decay-{kind}": (("gates", kind),) for kind in GATES},
    "no-gates": (("gates", "none"),),
    "norm": (("qk_l2norm", True),),
    "norm-no-gates": (("qk_l2norm", True), ("gates", "none")),
    "norm-mixed": (("qk_l2norm", True), ("gates", "mixed")),
    "scale": (("scale", 0.3),),
}

SUBJECTS = (
    Subject(
        op="delta_rule",
        inputs=inputs,
        call=call,
        truth=partial(by, DEFINITION),
        chunked=partial(by, TorchRunner(chunked)),
        tokens=("q", "k", "v", "g", "beta"),
        states=("state",),
        step=step_one,
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
                for k in (*GATES, "none")
            ),
        ),
    ),
    Subject(
        op="delta_rule_decode",
        inputs=decode_inputs,
        call=decode_call,
        truth=decode_truth,
        tokens=("q", "k", "v", "g", "beta"),
        states=("state",),
        differentiable=False,
        cases=(*decode_cases(), *(Case(i, T=3, options=o) for i, o in OPTIONS.items())),
    ),
)
