"""Clocks, memory peaks and copy bandwidth of a device: CUDA events on a GPU, wall clock on a CPU. No clock syncs in a step."""

import functools
import time
from pathlib import Path

import torch


class Clock:
    """Marks on one device's time line; durations are read once, at the end.

    >>> clock = Clock(device); clock.mark(); ...; clock.mark(); clock.durations_ms()
    """

    def __init__(self, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self.marks: list = []
        self.resumed: set[int] = set()

    def resume(self) -> None:
        """Mark after a pause: what lies between the mark before it and this one is no duration."""
        self.resumed.add(len(self.marks))
        self.mark()

    def mark(self) -> None:
        if self.on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def durations_ms(self) -> list[float]:
        """Milliseconds between neighbouring marks, pauses left out."""
        pairs = [(self.marks[i - 1], self.marks[i]) for i in range(1, len(self.marks)) if i not in self.resumed]
        if self.on_cuda:
            torch.cuda.synchronize()
            return [start.elapsed_time(end) for start, end in pairs]
        return [(end - start) * 1000 for start, end in pairs]


class Stopwatch:
    """Context manager that adds up the stretches it encloses."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stretches: list[Clock] = []

    def __enter__(self) -> None:
        self.stretches.append(Clock(self.device))
        self.stretches[-1].mark()

    def __exit__(self, *exc) -> None:
        self.stretches[-1].mark()

    def total_ms(self) -> float:
        """Sum so far; starts again at zero."""
        total = sum(sum(clock.durations_ms()) for clock in self.stretches)
        self.stretches.clear()
        return total


@functools.cache
def _can_reset_peak() -> bool:
    # where the kernel lacks or forbids it, a peak would carry over from an earlier phase: unknown is better than wrong
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def reset_peak(device: torch.device) -> None:
    """Start a new peak."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    elif _can_reset_peak():
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """Highest memory since reset_peak: allocator peak on CUDA, peak resident size of the process on a CPU; None if unknown."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    if not _can_reset_peak():
        return None
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


@functools.cache
def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of a large copy on the device; the best of 9: a ceiling is what can be reached."""
    size = 1 << 30 if device.type == "cuda" else 1 << 28
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    clock = Clock(device)
    target.copy_(source)
    clock.mark()
    for _ in range(9):
        target.copy_(source)
        clock.mark()
    return 2 * size / (min(clock.durations_ms()) / 1000)


def device_name(device: torch.device) -> str:
    """Name of the GPU, or of the processor with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{model} ({torch.get_num_threads()} threads)"
