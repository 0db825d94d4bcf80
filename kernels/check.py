"""Tells which implementation every op runs on this machine, and why.

python -m kernels.check                   on the device that impl=auto would use
python -m kernels.check --device cpu
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import torch

from kernels import IMPLS

# NVIDIA's compute capability with bf16 and asynchronous copies
MIN_CAPABILITY = (8, 0)
ANY = "any"
# head dims that an op's Triton kernels run
HEAD_DIMS = {
    "column_sums": "16, 32, 64, 128, 256",
    "decode_attention": "multiples of 8 up to 256",
    "decode_attention_quant": "64, 128, 256",
    "append_quant": "64, 128, 256",
    "prefill_attention": "16, 32, 64, 128, 256",
    "quantize": "64, 128, 256",
    "rope_append": "powers of two",
    "rows_attention": "16, 32, 64, 128, 256",
}
NOTES = {"prefill_attention": "dense prefill runs impl=sdpa"}


def ops() -> list[str]:
    """Names of all ops."""
    return sorted(file.parent.name for file in Path(__file__).parent.glob("*/api.py"))


def has_triton(op: str) -> bool:
    return (Path(__file__).parent / op / "triton.py").exists()


def why_not_triton(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on this device, in a few words; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    try:
        import triton
    except Exception as error:  # a broken installation fails in many ways
        return f"triton does not import: {error}"
    if device.type != "cuda":
        return None if triton.knobs.runtime.interpret else f"{device.type} is no CUDA device"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.cuda and capability < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
    return None


def choose(impl: str, device: torch.device | str) -> str:
    """The implementation that `impl` means on `device`: auto is triton on a CUDA device that can run it, else reference.

    Raises:
        ValueError: triton is asked for and cannot run, or there is no such implementation.
    """
    device = torch.device(device)
    match impl:
        case "auto":
            return "triton" if device.type == "cuda" and why_not_triton(device) is None else "reference"
        case "triton":
            if reason := why_not_triton(device):
                raise ValueError(f"impl=triton cannot run: {reason} (set impl=auto or impl=reference)")
            return impl
        case "reference":
            return impl
    raise ValueError(f"impl={impl!r} is not one of auto, {', '.join(IMPLS)}")


def launches(device: torch.device) -> str | None:
    """What goes wrong when a small kernel is compiled and run, the C compiler that Triton calls included; None if nothing."""
    from kernels.compact import compact

    rows = torch.arange(64.0, device=device).view(1, 1, 8, 8)
    try:
        kept = compact(rows, torch.tensor([1, 5], device=device), impl="triton")
    except Exception as error:  # whatever a broken toolchain raises
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else 'no message'}"
    return None if torch.equal(kept, rows[:, :, [1, 5]]) else "a copy came out wrong"


def table(device: torch.device) -> list[dict]:
    """One row per op: op, impl, head_dims, why."""
    reason = why_not_triton(device)
    chosen = choose("auto", device)
    broken = launches(device) if chosen == "triton" else None
    rows = []
    for op in ops():
        impl = chosen if has_triton(op) else "reference"
        why = (
            "no Triton kernel" if not has_triton(op) else "CUDA" if impl == "triton" else reason or "interpreting is for tests"
        )
        if impl == "triton" and broken:
            why = f"fails here: {broken}"
        elif op in NOTES:
            why += f"; {NOTES[op]}"
        rows.append({"op": op, "impl": impl, "head_dims": HEAD_DIMS.get(op, ANY) if impl == "triton" else ANY, "why": why})
    return rows


def versions(device: torch.device) -> str:
    """One line about the machine."""
    triton = "no triton"
    if importlib.util.find_spec("triton") is not None:
        triton = f"triton {importlib.metadata.version('triton')}"
    name = "CPU"
    if device.type == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(device)
        name = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
    return f"{name}; torch {torch.__version__}, {triton}, Python {sys.version.split()[0]}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.check", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(parser.parse_args(argv).device)
    rows = table(device)
    print(versions(device))
    titles = {"op": "op", "impl": "impl=auto runs", "head_dims": "head dims", "why": "why"}
    widths = {key: max(len(row[key]) for row in [titles, *rows]) for key in titles}
    for row in [titles, {key: "-" * width for key, width in widths.items()}, *rows]:
        print("  ".join(row[key].ljust(width) for key, width in widths.items()).rstrip())
    return int(any(row["why"].startswith("fails here") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
