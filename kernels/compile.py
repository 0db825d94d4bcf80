"""Compiles Triton kernels for sm_90 without a GPU: registers, spills, shared memory and instructions of each case.

python -m kernels.compile                 every op's cases, one line each; exit 1 if one spills or lacks an instruction
python -m kernels.compile select --all    one op, all of its cases
"""

import argparse
import importlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CAPABILITY = 90
MAX_SHARED = 232448
# cases that say little beside their neighbours, left out unless all are asked for
TWINS = re.compile(r"fp16|-G7|-D64")


@dataclass(frozen=True)
class Compiled:
    ptx: str
    cubin: bytes
    n_regs: int
    n_spills: int  # bytes of stack per thread: registers that did not fit
    shared: int  # bytes of shared memory

    def missing(self, expect: list[str]) -> list[str]:
        """Instructions of `expect` that the PTX has nowhere; "a|b" wants one of both."""
        return [name for name in expect if not any(choice in self.ptx for choice in name.split("|"))]


def compile_sm90(
    fn, signature: dict, constexprs: dict, num_warps: int, num_stages: int, divisible: list[str] | None = None
) -> Compiled:
    """Compile one specialisation of a @triton.jit function.

    Args:
        signature: type of every argument that is no constexpr, by name: "*bf16", "i32", "fp32".
        divisible: names of arguments that are multiples of 16, as a launch finds out by itself; None: pointers and strides.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.knobs.runtime.interpret:
        raise RuntimeError("compile_sm90 needs TRITON_INTERPRET unset before kernels are imported")
    names = fn.arg_names
    if divisible is None:
        divisible = [n for n, kind in signature.items() if kind.startswith("*") or n.startswith("stride")]
    source = ASTSource(
        fn,
        {name: "constexpr" if name in constexprs else signature[name] for name in names},
        {(names.index(name),): value for name, value in constexprs.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    done = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    regs, spills = usage(done.asm["cubin"])
    return Compiled(done.asm["ptx"], done.asm["cubin"], regs, spills, done.metadata.shared)


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack per thread of a binary with one kernel."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    regs, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return int(regs), int(stack)


def ops() -> list[str]:
    """Ops with Triton kernels that name compile cases: dicts of what compile_sm90 takes, name, expect and maybe max_spills."""
    files = sorted(Path(__file__).parent.glob("*/triton.py"))
    return [file.parent.name for file in files if "def compile_cases" in file.read_text()]


def cases_of(op: str, every: bool = True) -> list[dict]:
    cases = importlib.import_module(f"kernels.{op}.triton").compile_cases()
    return cases if every else [case for case in cases if not TWINS.search(case["name"])] or cases[:1]


def check_case(op: str, name: str) -> dict:
    """Compile one case; `failed` says in one line what is wrong with it, None if nothing is."""
    case = next(case for case in cases_of(op) if case["name"] == name)
    keys = ("fn", "signature", "constexprs", "num_warps", "num_stages", "divisible")
    row = {"op": op, "name": name, "regs": None, "spills": None, "shared": None, "failed": None}
    try:
        done = compile_sm90(**{key: case[key] for key in keys if key in case})
    except Exception as error:  # any failure of the compiler is the result
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return row | {"failed": f"{type(error).__name__}: {lines[-1] if lines else ''}"}
    row |= {"regs": done.n_regs, "spills": done.n_spills, "shared": done.shared}
    if done.n_spills > case.get("max_spills", 0):
        row["failed"] = f"spills {done.n_spills} bytes"
    elif done.shared > MAX_SHARED:
        row["failed"] = f"wants {done.shared} of {MAX_SHARED} bytes of shared memory"
    elif missing := done.missing(case["expect"]):
        row["failed"] = f"no {', '.join(missing)} in the PTX"
    return row


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.compile", description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", help="ops to compile; none: all")
    parser.add_argument("--all", action="store_true", help="also cases that say little beside the others")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of lines")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.ops) - set(ops())):
        parser.error(f"no compile cases in {', '.join(unknown)}; ops: {', '.join(ops())}")
    # read when kernels are imported, here and in the workers
    os.environ.pop("TRITON_INTERPRET", None)
    todo = [(op, case["name"]) for op in args.ops or ops() for case in cases_of(op, args.all)]
    cache = tempfile.mkdtemp(prefix="kvgauge-compile-")
    os.environ["TRITON_CACHE_DIR"] = cache
    try:
        with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            rows = list(pool.map(check_case, *zip(*todo, strict=True)))
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    if args.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            state = row["failed"] or "ok"
            print(f"{row['name']:44} {row['regs'] or '-':>4} regs {row['shared'] or 0:>7} B shared  {state}")
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
