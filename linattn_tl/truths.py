"""What an op's definition gives in float64, for the trials of its kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Truth:
    """Outputs, what forward keeps, the upstream gradients used and the gradients found, one an input."""

    outputs: tuple[Any, ...]
    saved: tuple[Any, ...]
    upstream: tuple[Any, ...]
    grads: list[Any]


def truth(runner: Any, inputs: Sequence[Any], lengths: Any, opt: Any, seed: int = 1) -> Truth:
    """By a runner in plain torch, from inputs whose third is v and gives its dtype to the first output's gradient.

    The others are states: they have gradients, in their own precision, if opt.output_final_state.
    """
    exact = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    outputs, saved = runner.forward(exact, lengths, opt._replace(output_final_state=True))
    g = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(inputs[0].dtype, torch.float32)
    upstream: list[Any] = [torch.randn(outputs[0].shape, generator=g).to(inputs[2].dtype)]
    for state in outputs[1:]:
        drawn = torch.randn(state.shape, generator=g).to(wide)
        upstream.append(drawn if opt.output_final_state else None)
    # without tokens an output may depend on nothing
    pairs = [(x, u.double()) for x, u in zip(outputs, upstream, strict=True) if u is not None and x.requires_grad]
    leaves, ends = [x for x in exact if x is not None], [x for x, _ in pairs]
    made = (
        torch.autograd.grad(ends, leaves, [u for _, u in pairs], allow_unused=True) if pairs else [None] * len(leaves)
    )
    found = iter(made)
    grads = [None if x is None else next(found) for x in exact]
    return Truth(_detached(outputs), _detached(saved), tuple(upstream), grads)


def _detached(tensors: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(None if x is None else x.detach() for x in tensors)
