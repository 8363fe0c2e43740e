"""What runners in plain torch have in common, whatever the family."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch

Outputs = tuple[torch.Tensor, torch.Tensor]  # o and the state of one batch


def full_precision(x: torch.Tensor) -> Any:
    """No autocast inside: it would do the fp32 sums in 16 bits."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


class PlainRunner:
    """A runner whose forward is written in plain torch, so that torch differentiates it."""

    differentiable = True

    def forward(self, inputs: Sequence[Any], lengths: Any, opt: Any, keep: bool = True) -> tuple[Any, Any]:
        raise NotImplementedError

    def backward(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        saved: Sequence[Any],
        lengths: Any,
        grads: Sequence[Any],
        needs: Sequence[bool],
        opt: Any,
    ) -> list[Any]:
        """Gradients by autograd, for callers that stand below it (library ops): computes forward again."""
        with torch.enable_grad():
            leaves = [
                x if x is None else x.detach().requires_grad_(bool(n)) for x, n in zip(inputs, needs, strict=True)
            ]
            outputs, _ = self.forward(leaves, lengths, opt._replace(output_final_state=True))
            pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
            wanted: Any = [x for x, n in zip(leaves, needs, strict=True) if n]
            if not pairs or not wanted:
                return [torch.zeros_like(x) if n else None for x, n in zip(inputs, needs, strict=True)]
            found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
        return [_or_zeros(next(found), x) if n else None for x, n in zip(inputs, needs, strict=True)]


def _or_zeros(grad: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x) if grad is None else grad


def each(f: Callable[[Any], Any], *tensors: Any) -> Any:
    """f of every tensor, None for one that is missing."""
    return tuple([None if x is None else f(x) for x in tensors])


# ---- chunk forms


def decays(g: torch.Tensor) -> torch.Tensor:
    """exp(g_{j+1} + ... + g_i) [..., C, C] for j <= i, else 0, of g [..., C].

    Each sum is made by itself. A difference of running sums would lose a small gate behind a large one, and
    -inf - -inf is no number.
    """
    C = g.shape[-1]
    below = torch.ones(C, C, dtype=torch.bool, device=g.device).tril(-1)
    sums = g.unsqueeze(-1).expand(*g.shape, C).masked_fill(~below, 0).cumsum(-2)
    return sums.masked_fill(~(below | torch.eye(C, dtype=torch.bool, device=g.device)), -torch.inf).exp()


def packed(form: Callable[..., Outputs], tokens: Sequence[Any], state: Any, lengths: Any, opt: Any) -> Outputs:
    """form(*tokens, state, opt) over each packed sequence of its own, or over the batch.

    tokens: [B, T, ...] each, q, k and v first, None for one that is missing. A missing initial state is zeros.
    """
    q, _, v = tokens[:3]
    N = q.shape[0] if lengths is None else lengths.shape[0] - 1
    if state is None:
        acc = torch.promote_types(q.dtype, torch.float32)
        state = torch.zeros(N, v.shape[2], q.shape[3], v.shape[3], dtype=acc, device=q.device)
    if lengths is None:
        return form(*tokens, state, opt)
    parts = [
        form(*each(lambda x, a=a, b=b: x[:, a:b], *tokens), state[i : i + 1], opt)
        for i, (a, b) in enumerate(pairwise(lengths.tolist()))
    ]
    if not parts:
        return v.new_zeros(v.shape), state
    o, states = zip(*parts, strict=True)
    return torch.cat(o, 1), torch.cat(states)


class FormRunner(PlainRunner):
    """A form (*tokens, state, options) -> (o, state) as a runner; inputs are tokens, q, k and v first, and a state."""

    def __init__(self, form: Callable[..., Outputs]):
        self.form = form

    def forward(self, inputs: Sequence[Any], lengths: Any, opt: Any, keep: bool = True) -> tuple[Any, Any]:
        *tokens, initial = inputs
        with full_precision(inputs[0]):
            o, state = packed(self.form, tokens, initial, lengths, opt)
        if state is initial and state is not None:  # without a token: it belongs to the caller
            state = state.clone()
        return (o, state if opt.output_final_state else None), ()


@torch.no_grad()
def step(form: Callable[..., Outputs], tokens: Any, state: Any, slots: Any, opt: Any, out: Any) -> Any:
    """One step of a form in place on the pool's rows; q [B, H, K] or [B, n, H, K] comes first. Returns out."""
    if tokens[0].ndim == 3:
        step(form, each(lambda x: x.unsqueeze(1), *tokens), state, slots, opt, out.unsqueeze(1))
        return out
    with full_precision(tokens[0]):
        if slots is None:
            o, new = form(*tokens, state, opt)
            state.copy_(new)
            return out.copy_(o)
        live = slots >= 0
        picked = slots[live].long()
        o, new = form(*each(lambda x: x[live], *tokens), state[picked], opt)
    state[picked] = new.to(state.dtype)
    out[live] = o.to(out.dtype)
    out[~live] = 0  # last: out may be one of the inputs
    return out
