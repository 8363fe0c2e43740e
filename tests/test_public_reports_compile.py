"""What went wrong for others, part 2: R15, torch.compile and the library ops beneath it."""

import pytest
import torch

from autotune.verify import check_close
from linattn_tl import LinearState, linear_attention
from linattn_tl.ops.linear_attention.definition import Options

pytestmark = pytest.mark.usefixtures("binaries")
OPTIONS = ("elu1", True, True, 1.0, 1e-6)  # plain options of the op, but for output_final_state


def qkv(B=1, T=20, H=2, HV=2, K=16, V=16, dtype=torch.float32, grad=True):
    sizes = ((B, T, H, K), (B, T, H, K), (B, T, HV, V))
    return [torch.randn(*s, dtype=dtype, requires_grad=grad) for s in sizes]


@pytest.mark.parametrize("backend", ["binary", "torch"])
@pytest.mark.parametrize("final", [False, True], ids=["no-final", "final"])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_R15_compiled_is_eager_for_changing_lengths(backend, final, compiler):
    def run(q, k, v, kv, z):
        o, state = linear_attention(
            2 * q, k, v, initial_state=LinearState(kv, z), output_final_state=final, backend=backend
        )
        return (o + 1, state.kv * 2, state.z) if final else (o + 1,)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(run, fullgraph=True, backend=compiler)
    for T in (64, 65, 130):
        inputs = [
            *qkv(T=T, HV=4),
            torch.randn(1, 4, 16, 16, requires_grad=True),
            torch.rand(1, 2, 16, requires_grad=True),
        ]
        got, want = compiled(*inputs), run(*inputs)
        upstream = [torch.randn_like(x) for x in want]
        for x, y in zip(got, want, strict=True):
            check_close(f"T={T}", x.detach(), y.detach().double())
        found, exact = (torch.autograd.grad(out, inputs, upstream) for out in (got, want))
        for x, y in zip(found, exact, strict=True):
            check_close(f"T={T}: gradient", x, y.double())
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= 3, f"{graphs} graphs: more than 2 recompiles"


@pytest.mark.parametrize(
    "options", [{"causal": False}, {"cu_seqlens": torch.tensor([0, 7, 20])}], ids=["full", "packed"]
)
def test_R15_compiled_without_state(options):
    inputs = qkv()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: linear_attention(*x, **options)[0], fullgraph=True, backend="aot_eager")
    got, want = compiled(*inputs), linear_attention(*inputs, **options)[0]
    check_close("o", got.detach(), want.detach().double())
    upstream = torch.randn_like(want)
    found, exact = (torch.autograd.grad(o, inputs, upstream) for o in (got, want))
    for x, y in zip(found, exact, strict=True):
        check_close("gradient", x, y.double())


CHECKED = {
    "binary": ("binary", torch.float32, None),
    "bfloat16": ("binary", torch.bfloat16, None),
    "packed": ("binary", torch.float32, [0, 7, 7, 20]),
    "torch": ("torch", torch.float32, None),
    "torch-bfloat16": ("torch", torch.bfloat16, None),
    "torch-packed": ("torch", torch.float32, [0, 7, 7, 20]),
    "float64": ("auto", torch.float64, None),
}


@pytest.mark.parametrize("row", CHECKED.values(), ids=CHECKED)
@pytest.mark.parametrize("state", [False, True], ids=["no-state", "state"])
@pytest.mark.parametrize("final", [False, True], ids=["no-final", "final"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_R15_opcheck(row, state, final, causal):
    backend, dtype, lengths = row
    q, k, v = qkv(T=20, HV=4, V=24, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    N = 1 if lengths is None else len(lengths) - 1
    kv, z = torch.randn(N, 4, 16, 24, dtype=wide), torch.rand(N, 2, 16, dtype=wide)
    given = (kv.requires_grad_(), z.requires_grad_()) if state else (None, None)
    cu = None if lengths is None else torch.tensor(lengths)
    opt = Options(causal=causal, output_final_state=final)
    tolerance = {"atol": 1e-5, "rtol": 1e-4} if dtype != torch.bfloat16 else {"atol": 0.05, "rtol": 0.05}
    torch.library.opcheck(
        torch.ops.linattn_tl.linear_attention.default, (q, k, v, *given, cu, *opt, backend), **tolerance
    )


@pytest.mark.parametrize("backend", ["binary", "torch"])
def test_R15_opcheck_decode(backend):
    q, k, v = qkv(B=3, T=2, HV=4, V=24, grad=False)
    kv, z, out = torch.randn(5, 4, 16, 24), torch.rand(5, 2, 16), torch.zeros_like(v)
    slots = torch.tensor([4, -1, 0])
    op = torch.ops.linattn_tl.linear_attention_decode.default
    torch.library.opcheck(op, (q, k, v, kv, z, out, slots, *OPTIONS, backend))
