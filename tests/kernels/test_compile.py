"""Every op's Triton kernels compile for sm_90 without spills and with the instructions that make them fast; needs no GPU."""

import json
import os
import subprocess
import sys

import pytest

from kernels.compile import ops

pytest.importorskip("triton")


def in_fresh_process(*arguments):
    """Here the environment may have told Triton to interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def compiled():
    done = in_fresh_process("-m", "kernels.compile", "--json")
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("op", ops())
def test_compiles_for_sm90(op, compiled):
    rows = [row for row in compiled if row["op"] == op]
    assert rows
    assert [f"{row['name']}: {row['failed']}" for row in rows if row["failed"]] == []


KERNEL = """
import triton, triton.language as tl
from kernels.compile import compile_sm90

@triton.jit
def add(x, y, num, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o, mask=o < num, other=0.0) + 1.0, mask=o < num)

@triton.jit
def spilling(x, y, num, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    first = tl.load(x + o)
    tl.store(y + o, first / tl.sum(first * first, 0))

types = {"x": "*fp32", "y": "*fp32", "num": "i32"}
wide = compile_sm90(add, types, {"BLOCK": 1024}, 4, 1, divisible=["x", "y", "num"])
narrow = compile_sm90(add, types, {"BLOCK": 1024}, 4, 1)
assert wide.missing(["ld.global.v4"]) == [] and narrow.missing(["ld.global.v4", "ld.global|wgmma"]) == ["ld.global.v4"]
assert wide.n_spills == 0 and 8 <= wide.n_regs <= 255 and wide.shared == 0 and wide.cubin
assert compile_sm90(spilling, types, {"BLOCK": 16384}, 1, 1).n_spills > 0
print("fine")
"""


def test_says_what_a_kernel_became(tmp_path):
    (tmp_path / "kernel.py").write_text(KERNEL)
    environment = {"PYTHONPATH": os.getcwd(), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment |= {n: v for n, v in os.environ.items() if n not in ("TRITON_INTERPRET", *environment)}
    done = subprocess.run([sys.executable, str(tmp_path / "kernel.py")], capture_output=True, text=True, env=environment)
    assert done.stdout == "fine\n", done.stderr


def test_refuses_unknown_ops():
    done = in_fresh_process("-m", "kernels.compile", "warp")
    assert done.returncode == 2 and "no compile cases in warp; ops: append" in done.stderr
