"""What qk_l2norm divides by: sqrt(sum x^2 + NORM_EPS)."""

NORM_EPS = 1e-6
