"""Runs the CUDA C++ that TileLang generates on the CPU, with checks and counters. No GPU and no CUDA toolkit.

    k = emulate(prim_func, "sm_90a")
    report = k(q, k, v, o)
    report.assert_clean()
    print(report)

`k.check(...)` does so under several schedules of threads and asynchronous copies. From the command line:
`python -m autotune.emulator FILE.py::factory --arch sm_90a`. x86-64 Linux with g++.
"""

from autotune.emulator.errors import EmulatorError
from autotune.emulator.lowering import Lowered, lower
from autotune.emulator.report import Finding, NotCleanError, Report
from autotune.emulator.runner import Emulated, emulate

__all__ = ["Emulated", "EmulatorError", "Finding", "Lowered", "NotCleanError", "Report", "emulate", "lower"]
