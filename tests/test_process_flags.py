"""A call leaves the process as it found it: floating-point mode, threads, locale, folder, environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("binaries")
ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = dict(os.environ)  # before this process made a call

# Prints what a first call, or a build, changed. Runs in a process of its own: the flags of this one are long set.
PROGRAM = """
import ctypes, gc, json, locale, logging, os, signal, sys, threading
import numpy as np
import torch

locale.setlocale(locale.LC_ALL, "")
libm = ctypes.CDLL("libm.so.6")


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def flags():
    fenv = (ctypes.c_ubyte * 32)()
    libm.fegetenv(fenv)
    mxcsr = int.from_bytes(bytes(fenv[28:32]), "little")
    tiny = torch.full((1_000_000,), 1e-40)
    return {
        "flush to zero, denormals are zero, rounding": hex(mxcsr & 0xFFC0),
        "rounding mode": libm.fegetround(),
        "subnormals in numpy": float(np.float32(1e-40) * np.float32(0.5)),
        "subnormals in torch, on all threads": int((tiny * 0.5 > 0).sum()),
        "numpy errors": np.geterr(),
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch defaults": [str(torch.get_default_dtype()), torch.is_grad_enabled()],
        "torch determinism": torch.are_deterministic_algorithms_enabled(),
        "torch precision": [torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled],
        "random state": hash(torch.get_rng_state().numpy().tobytes()),
        "locale": locale.setlocale(locale.LC_ALL),
        "folder": os.getcwd(),
        "umask": umask(),
        "recursion limit": sys.getrecursionlimit(),
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGFPE)],
        "excepthook": sys.excepthook is sys.__excepthook__,
        "root logger": [logging.getLogger().level, len(logging.getLogger().handlers)],
        "garbage collection": [gc.isenabled(), list(gc.get_threshold())],
        "python threads": threading.active_count(),
    }


q, k, v = (torch.randn(2, 600, 4, 64, requires_grad=True) for _ in "qkv")
state = (torch.zeros(2, 4, 64, 64), torch.zeros(2, 4, 64))
(q @ k.mT).sum().backward()  # torch starts its own threads
before, environment = flags(), dict(os.environ)

from linattn_tl import last_backend, linear_attention, linear_attention_decode, stats

backend = sys.argv[1]
if backend != "jit":  # one kernel to build is enough
    o, _ = linear_attention(q, k, v, backend=backend)
    o.sum().backward()
with torch.no_grad():
    linear_attention_decode(q[:, 0], k[:, 0], v[:, 0], state, backend=backend)
after = flags()
print(json.dumps({
    "served": last_backend("linear_attention_decode"),
    "compiled": stats()["compile"],
    "changed": {n: [before[n], after[n]] for n in before if before[n] != after[n]},
    "variables": sorted(n for n in {**environment, **os.environ} if environment.get(n) != os.environ.get(n)),
}))
"""


def run(backend, **environment):
    env = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2", **environment}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, backend], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("backend", ["binary", "torch"])
def test_calls_change_nothing(backend):
    found = run(backend)
    assert found["served"] == backend
    assert (found["changed"], found["variables"]) == ({}, [])


@pytest.mark.slow
def test_building_changes_nothing(tmp_path):
    found = run("jit", LINATTN_TL_CACHE_DIR=str(tmp_path))
    assert (found["served"], found["compiled"]) == ("jit", 1)
    assert (found["changed"], found["variables"]) == ({}, [])
