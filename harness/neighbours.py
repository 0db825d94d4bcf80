"""Who else uses the device while a cell is measured: other processes on the GPU, or more load than the CPU has cores."""

import os
import subprocess

import psutil
import torch

# a driver holds some memory of an idle GPU
IDLE_BYTES = 1 << 30
SMI_SECONDS = 20


class Watch:
    """Looks before the cell touches the device and, in `who`, after it has run."""

    def __init__(self, device: torch.device):
        self.device = device
        self.before = gpu_neighbours(device, ours=False) if device.type == "cuda" else cpu_neighbours()

    def who(self) -> str | None:
        """The neighbours in a few words; None when there were none. On a CPU our own load is known only before."""
        return self.before or (gpu_neighbours(self.device, ours=True) if self.device.type == "cuda" else None)


def cpu_neighbours() -> str | None:
    """The load and the busiest other processes where more wants to run than there are cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0]
    # our own last cell keeps every core busy, and the sweep's display a little more
    if load <= cores + 0.5:
        return None
    busy = []
    for process in psutil.process_iter(["pid", "name"]):
        try:
            process.cpu_percent()
            busy.append(process)
        except psutil.Error:
            continue
    psutil.cpu_percent(interval=0.2)
    shares = []
    for process in busy:
        try:
            if process.pid != os.getpid() and (share := process.cpu_percent()) >= 20:
                shares.append((share, f"{process.info['name']} (pid {process.pid})"))
        except psutil.Error:
            continue
    names = ", ".join(name for _, name in sorted(shares, reverse=True)[:3])
    return f"load {load:.1f} on {cores} cores{f': {names}' if names else ''}"


def gpu_neighbours(device: torch.device, ours: bool) -> str | None:
    """Other processes on this GPU by nvidia-smi, or memory that is held where none is visible; None also if unknown.

    ours: this process is on it too.
    """
    listed = _smi(device, "--query-compute-apps=pid,process_name,used_memory")
    if listed is None:
        return None
    others = [line for line in listed if line[0] != str(os.getpid())]
    if ours and len(others) == len(listed) and others:
        # a container has process ids of its own: one of these is this process
        others = others[1:]
    if others:
        return ", ".join(f"{name} (pid {pid}, {used} MiB)" for pid, name, used in others[:3])
    used = _smi(device, "--query-gpu=memory.used")
    if not ours and used and used[0][0].isdigit() and (held := int(used[0][0]) << 20) > IDLE_BYTES:
        return f"{held >> 20} MiB are held by processes that cannot be seen from here"
    return None


def _smi(device: torch.device, query: str) -> list[list[str]] | None:
    """Lines of an nvidia-smi query about one GPU; None where the tool is missing or refuses."""
    index = device.index or 0
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    name = visible[index] if index < len(visible) else str(index)
    command = ["nvidia-smi", "-i", name, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
