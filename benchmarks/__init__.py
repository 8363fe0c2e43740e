"""Speed against other ways to compute the same, measured in one run: `python -m benchmarks.run`."""
