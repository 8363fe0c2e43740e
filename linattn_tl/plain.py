"""What runners in plain torch have in common, whatever the family."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch


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
