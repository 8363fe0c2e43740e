"""Is a result right? Error budgets against the float64 definition, the same for the tuner and the tests."""

from typing import Any

CAP = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2, "float64": 1e-12}  # relative RMS, never loosened


class VerificationError(RuntimeError):
    """A kernel computed something else than the definition."""


def relative_rms(actual: Any, exact: Any) -> float:
    """RMS of the error over the RMS of the truth (or the error itself where the truth is zero)."""
    if exact.numel() == 0:
        return 0.0
    error = (actual.double() - exact).square().mean().sqrt().item()
    return error / (exact.square().mean().sqrt().item() or 1.0)


def check_close(name: str, actual: Any, exact: Any, *, plain: Any = None, dtype: str | None = None) -> float:
    """The relative RMS of actual; VerificationError if it is over budget, not finite, or of another shape.

    exact is the definition in float64. The budget is the cap of the dtype and, where `plain` (the definition in that
    dtype) is given, twice its error plus one rounding.
    """
    import torch

    if tuple(actual.shape) != tuple(exact.shape):
        raise VerificationError(f"{name} has shape {tuple(actual.shape)}; expected {tuple(exact.shape)}")
    if not torch.isfinite(actual).all():
        raise VerificationError(f"{name} is not finite in {int((~torch.isfinite(actual)).sum())} places")
    dtype = dtype or str(actual.dtype).removeprefix("torch.")
    budget = CAP[dtype]
    if plain is not None:
        budget = min(budget, 2 * relative_rms(plain, exact) + torch.finfo(getattr(torch, dtype)).eps)
    error = relative_rms(actual, exact)
    if not error <= budget:
        raise VerificationError(f"{name} has relative RMS error {error:.2e}; expected at most {budget:.2e}")
    return error
