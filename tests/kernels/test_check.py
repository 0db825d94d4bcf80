"""What runs where, and the lines that say why not."""

import subprocess
import sys

import pytest
import torch

from kernels import check, need_triton

CPU = torch.device("cpu")


@pytest.fixture
def compiled_only(monkeypatch):
    """As outside the tests, where nothing interprets kernels."""
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)


@pytest.fixture
def without_triton(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


@pytest.fixture
def fake_gpu(monkeypatch):
    def with_capability(*capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.version, "cuda", "13.0")

    return with_capability


def test_choose_on_cpu(compiled_only):
    assert check.choose("auto", CPU) == check.choose("reference", "cpu") == "reference"
    with pytest.raises(
        ValueError, match=r"^impl=triton cannot run: cpu is no CUDA device \(set impl=auto or impl=reference\)$"
    ):
        check.choose("triton", CPU)


def test_choose_while_interpreting():
    import triton

    if not triton.knobs.runtime.interpret:
        pytest.skip("compiled here")
    assert check.choose("auto", CPU) == "reference" and check.choose("triton", CPU) == "triton"


def test_choose_on_gpu(fake_gpu):
    fake_gpu(9, 0)
    assert check.choose("auto", "cuda") == check.choose("triton", "cuda:0") == "triton"
    assert check.choose("reference", "cuda") == "reference"


def test_choose_on_old_gpu(fake_gpu):
    fake_gpu(7, 5)
    assert check.choose("auto", "cuda") == "reference"
    with pytest.raises(ValueError, match=r"compute capability 7.5 is below 8.0"):
        check.choose("triton", "cuda")


def test_choose_without_triton(fake_gpu, without_triton):
    fake_gpu(9, 0)
    assert check.choose("auto", "cuda") == "reference"
    with pytest.raises(ValueError, match="the package triton is not installed"):
        check.choose("triton", "cuda")


def test_choose_refuses_unknown():
    with pytest.raises(ValueError, match="impl='fast' is not one of auto, reference, triton"):
        check.choose("fast", CPU)


def test_need_triton(compiled_only):
    with pytest.raises(ValueError, match="^select: impl=triton needs CUDA tensors, got cpu") as caught:
        need_triton("select", torch.zeros(1))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="select: impl=triton wants all tensors on one device, got cpu, meta"):
        need_triton("select", torch.zeros(1), torch.zeros(1, device="meta"))


def test_need_triton_without_triton(without_triton):
    with pytest.raises(ValueError, match="^select: impl=triton needs the package triton, which is not installed"):
        need_triton("select", torch.zeros(1))


def test_ops_raise_that_line(compiled_only):
    from kernels.compact import compact
    from kernels.select import select

    with pytest.raises(ValueError, match="select: impl=triton needs CUDA tensors"):
        select(torch.zeros(8), 2, 0, 0, "triton")
    with pytest.raises(ValueError, match="compact: impl=triton needs CUDA tensors"):
        compact(torch.zeros(1, 1, 8, 4), torch.arange(2), impl="triton")


def test_table_names_every_op(compiled_only):
    rows = check.table(CPU)
    assert [row["op"] for row in rows] == check.ops() and {"select", "compact", "decode_attention"} <= set(check.ops())
    assert {row["impl"] for row in rows} == {"reference"}
    assert all("cpu is no CUDA device" in row["why"] or row["why"] == "no Triton kernel" for row in rows)
    assert set(check.HEAD_DIMS) <= set(check.ops())


def test_table_on_gpu_tries_a_kernel(fake_gpu, monkeypatch):
    fake_gpu(9, 0)
    monkeypatch.setattr(check, "launches", lambda device: None)
    rows = {row["op"]: row for row in check.table(torch.device("cuda"))}
    assert rows["decode_attention"]["impl"] == "triton" and rows["decode_attention"]["why"] == "CUDA"
    assert rows["prefill_attention"]["why"] == "CUDA; dense prefill runs impl=sdpa"
    monkeypatch.setattr(check, "launches", lambda device: "RuntimeError: no C compiler")
    assert check.table(torch.device("cuda"))[0]["why"] == "fails here: RuntimeError: no C compiler"
    assert check.table(CPU)[0]["impl"] == "reference"


def test_launches_a_kernel():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert check.launches(device) is None


def test_head_dims_are_those_of_the_kernels():
    def listed(names):
        return ", ".join(str(dim) for dim in sorted(names))

    from kernels.column_sums.triton import CONFIGS as COLUMN_SUMS
    from kernels.decode_attention_quant.triton import CONFIGS as QUANT
    from kernels.prefill_attention.triton import CONFIGS as PREFILL

    assert check.HEAD_DIMS["column_sums"] == listed(COLUMN_SUMS)
    assert check.HEAD_DIMS["prefill_attention"] == listed(PREFILL)
    assert check.HEAD_DIMS["decode_attention_quant"] == listed({dim for _, dim in QUANT})


def test_prints_a_table():
    done = subprocess.run([sys.executable, "-m", "kernels.check", "--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "torch" in lines[0] and lines[1].split()[:2] == ["op", "impl=auto"]
    assert any(line.split()[:2] == ["select", "reference"] for line in lines)
