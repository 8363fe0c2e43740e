"""python launch_alone.py OBJECT CONFIG IN.npz OUT.npz [LIBRARY]: one forward launch without torch, on three threads.

LIBRARY is loaded first, for all to see. Prints how many threads the launch has started.
"""

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from autotune.launcher.cpu import CpuBinary
from tl_kernels.linear_attention import cpu as kernels


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def strides(x: np.ndarray) -> list[int]:
    return [s // x.itemsize for s in x.strides[:3]]


def launch(binary: CpuBinary, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> dict[str, Any]:
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    o, den = np.full((B, T, HV, V), np.nan, np.float32), np.full((B, T, H), np.nan, np.float32)
    kv, z = np.full((B, HV, K, V), np.nan, np.float32), np.full((B, H, K), np.nan, np.float32)
    tokens = (q, k, v, o, den)
    addresses = binary.addresses(0, 0, *(x.ctypes.data for x in tokens), 0, kv.ctypes.data, 0, z.ctypes.data)
    walk = (B, T, H, HV // H, K, V, 1, 0, 3)
    switches = (1, 2, 1, 0, 1, 1.0, 1e-6)  # causal, emit and write den, carry, elu1, normalize, scale, eps
    binary(addresses + binary.fixed(*walk, *switches, *(s for x in tokens for s in strides(x))))
    return {"o": o, "den": den, "kv": kv, "z": z}


def main(path: str, config: str, source: str, out: str, library: str = "") -> None:
    if library:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    assert hasattr(ctypes.CDLL(None), "GOMP_parallel") == bool(library)
    given = np.load(source)
    binary = CpuBinary(Path(path), kernels.FWD, kernels.Config(**json.loads(config)))
    before = threads()
    np.savez(out, **launch(binary, given["q"], given["k"], given["v"]))
    print(threads() - before)
    assert "torch" not in sys.modules


main(*sys.argv[1:])
