"""The delta rule, gated or not: DeltaNet, Gated DeltaNet."""

from tl_kernels.delta_rule import cpu

KERNELS = {"cpu": cpu.KERNELS}
