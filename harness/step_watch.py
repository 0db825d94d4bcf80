"""What a decode step asks of PyTorch, op by op: where the host would wait and what a CUDA graph would freeze; on any device."""

import functools
import re
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# ops whose result the host must wait for
SYNCS = {
    "item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "allclose", "argwhere", "bincount",
    "unique_dim", "_unique2", "unique_consecutive", "tolist", "numpy", "cpu",
}  # fmt: skip


class StepWatch(TorchDispatchMode):
    """Notes every op of a step with its shapes and numbers, and those that the host must wait for."""

    def __init__(self):
        super().__init__()
        self.ops: list[str] = []
        self.waits: list[str] = []
        self.in_twins = 0  # in PyTorch twins of Triton kernels, which no GPU runs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.note(func._schema.name.partition("::")[2], args, kwargs)
        return func(*args, **(kwargs or {}))

    def note(self, name: str, args, kwargs, host_only: bool = False) -> None:
        place = caller()
        waits = name in SYNCS or (
            name == "index" and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        )
        if re.search(r"kernels/\w+/reference\.py", place):
            self.in_twins += waits
            return
        if waits:
            self.waits.append(f"{name.strip('_')} at {place}")
        # a pool of counters hands out the next slice in every launch: a graph keeps those that it has recorded
        if not host_only and "kernels/counters.py" not in place:
            self.ops.append(f"{name}({describe(args)}, {describe(kwargs)}) at {place}")


class HostWatch(TorchFunctionMode):
    """tolist, numpy and cpu, which do not reach the dispatcher on a CPU."""

    def __init__(self, watch: StepWatch):
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("tolist", "numpy", "cpu", "__array__"):
            self.watch.note(func.__name__.strip("_"), args, kwargs, host_only=True)
        return func(*args, **(kwargs or {}))


def caller() -> str:
    """File and line of the nearest frame that is neither torch's nor this file's."""
    frame = sys._getframe(1)
    while frame.f_back and not place_of(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{place_of(frame.f_code.co_filename)}:{frame.f_lineno}"


@functools.cache
def place_of(filename: str) -> str:
    """The end of a file's path; empty for torch's files and this one."""
    own = filename == __file__ or filename.startswith(str(Path(torch.__file__).parent))
    return "" if own else "/".join(Path(filename).parts[-3:])


def describe(value) -> str:
    """A call's argument as a graph would freeze it: shapes and strides of tensors, numbers as they are."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe, value))}]"
    if isinstance(value, dict):
        return describe(list(value.items()))
    return repr(value)
