"""Who else uses the device, from nvidia-smi's answers and the load average."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness import neighbours

ROOT = Path(neighbours.__file__).parents[1]
CUDA = torch.device("cuda", 0)


@pytest.fixture
def smi(monkeypatch):
    """Answers of nvidia-smi: what is listed as process lines, and the memory in use."""

    def answer(processes, used="100", ours=False):
        def fake(device, query):
            return [line.split(", ") for line in processes] if "apps" in query else [[used]]

        monkeypatch.setattr(neighbours, "_smi", fake)
        return neighbours.gpu_neighbours(CUDA, ours)

    return answer


OWN, OTHER = f"{os.getpid()}, python, 500", "77, train.py, 9000"


@pytest.mark.parametrize(
    ("processes", "used", "ours", "who"),
    [
        ([], "100", False, None),
        ([OTHER], "9100", False, "train.py (pid 77, 9000 MiB)"),
        ([OWN], "600", True, None),
        ([OWN, OTHER], "9600", True, "train.py (pid 77, 9000 MiB)"),
        # in a container this process is listed under another id
        (["1234, python, 500"], "600", True, None),
        (["1234, python, 500", OTHER], "9600", True, "train.py (pid 77, 9000 MiB)"),
        ([], "2000", False, "2000 MiB are held by processes that cannot be seen from here"),
        ([], "2000", True, None),
        ([], "[N/A]", False, None),
    ],
    ids=["alone", "other", "own", "own-and-other", "container", "container-other", "hidden", "own-memory", "unknown"],
)
def test_gpu(smi, processes, used, ours, who):
    assert smi(processes, used, ours) == who


@pytest.mark.gpu
def test_a_plan_leaves_the_gpu_alone(tmp_path):
    """The process of the sweep must not hold GPU memory while its cells are measured."""
    script = (
        "import torch\n"
        "from harness.config import preflight\n"
        "from harness.neighbours import _smi\n"
        "used = lambda: int(_smi(torch.device('cuda', 0), '--query-gpu=memory.used')[0][0])\n"
        "before = used()\n"
        "plan = preflight(['-m', 'model=dummy', 'model.device=cuda', 'method=full,window', 'logger=none'])\n"
        "print([cell.state for cell in plan.cells], used() - before)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    states, _, grown = done.stdout.strip().rpartition(" ")
    assert states == "['run', 'run']", done.stderr
    assert int(grown) < 100


def test_without_nvidia_smi_nothing_is_known(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert neighbours.gpu_neighbours(CUDA, ours=False) is None


def test_the_gpu_asked_about_is_the_visible_one(monkeypatch):
    asked = []
    monkeypatch.setattr(neighbours.subprocess, "run", lambda command, **_: asked.append(command[2]) or 1 / 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-abc")
    for index in (0, 1):
        with pytest.raises(ZeroDivisionError):
            neighbours._smi(torch.device("cuda", index), "--query-gpu=memory.used")
    assert asked == ["3", "GPU-abc"]


@pytest.mark.parametrize(("load", "noted"), [(0.0, False), (4.4, False), (9.0, True)])
def test_cpu(monkeypatch, load, noted):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    who = neighbours.cpu_neighbours()
    assert (who or "").startswith("load 9.0 on 4 cores") == noted
    assert noted or who is None
