"""linattn-tl explain: which backend would serve a call, and why not each other one."""

import argparse
import json

NAME = "explain"
HELP = "which backend would serve a call, and why not the others"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", help="e.g. linear_attention")
    parser.add_argument("--K", type=int, default=64, help="head dim of q and k (default 64)")
    parser.add_argument("--V", type=int, help="head dim of v (default K)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, float16, float64 (default float32)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--backend", default="auto", help="as the call's backend argument (default auto)")


def run(args: argparse.Namespace) -> int:
    from linattn_tl import registry
    from tl_kernels.spec import Problem, check_dtype_name

    op = registry.get_op(args.op)
    check_dtype_name(args.dtype, "float64")
    problem = Problem(op.name, args.dtype, args.K, args.V or args.K, args.device)
    found = registry.explain_problem(op, problem, args.backend)
    if args.json:
        print(json.dumps({"op": op.name, "backend": found.backend, "reasons": dict(found.rows)}, indent=1))
    else:
        print(found)
    return 0 if found.backend else 1
