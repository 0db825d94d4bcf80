"""append against a loop over rows, bit for bit; interpreted on CPU, compiled on a GPU."""

import pytest
import torch

from kernels.append import append

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ("reference", "triton")


def random(shape, dtype):
    if dtype.is_floating_point:
        return torch.randn(shape, device=DEVICE).to(dtype)
    return torch.randint(0, 200, shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("per_head", (False, True), ids=("slot-B", "slot-BH"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.uint8), ids=str)
@pytest.mark.parametrize("row", ((128,), (80,), (2,), (3, 5), ()), ids=lambda r: "row" + "x".join(map(str, r)))
def test_append_is_bit_exact(row, dtype, per_head, impl):
    slots = [random((3, 2, 7, *row), dtype) for _ in "kv"]
    rows = [random((3, 2, *row), dtype) for _ in "kv"]
    slot = torch.tensor([[0, 2], [6, 6], [3, 1]], device=DEVICE) if per_head else torch.tensor([0, 6, 3], device=DEVICE)
    expected = [x.clone() for x in slots]
    for seq in range(3):
        for head in range(2):
            at = slot[seq, head] if per_head else slot[seq]
            for x, new in zip(expected, rows, strict=True):
                x[seq, head, at] = new[seq, head]
    append(*slots, *rows, slot, impl)
    for x, want in zip(slots, expected, strict=True):
        assert torch.equal(x, want)


@pytest.mark.parametrize("impl", IMPLS)
def test_append_strided_and_converted(impl):
    k_slots = torch.zeros(1, 5, 3, 8, dtype=torch.float16, device=DEVICE).transpose(1, 2)
    v_slots = torch.zeros(1, 3, 5, 8, dtype=torch.float16, device=DEVICE)
    # rows as a projection leaves them: one tensor with queries, keys and values side by side
    qkv = torch.randn(1, 9, 8, device=DEVICE)
    append(k_slots, v_slots, qkv[:, 3:6], qkv[:, 6:], torch.tensor([4], device=DEVICE), impl)
    assert torch.equal(k_slots[0, :, 4], qkv[0, 3:6].half())
    assert torch.equal(v_slots[0, :, 4], qkv[0, 6:].half())
    assert not k_slots[:, :, :4].any() and not v_slots[:, :, :4].any()


@pytest.mark.gpu
def test_append_behind_2_to_the_31():
    slots = torch.zeros(1, 2, 9 * 2**20, 128, dtype=torch.bfloat16, device=DEVICE)
    k, v = torch.randn(2, 1, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    append(slots[:, :1], slots[:, 1:], k[:, :1], v[:, :1], torch.tensor([9 * 2**20 - 1], device=DEVICE), "triton")
    append(slots[:, 1:], slots[:, 1:], v[:, 1:], v[:, 1:], torch.tensor([9 * 2**20 - 2], device=DEVICE), "triton")
    assert torch.equal(slots[0, 0, -1], k[0, 0]) and torch.equal(slots[0, 1, -1], v[0, 0])
    assert torch.equal(slots[0, 1, -2], v[0, 1]) and not slots[:, :, :-2].any()


def test_append_refuses():
    slots, rows = torch.zeros(1, 2, 4, 8, device=DEVICE), torch.zeros(1, 2, 8, device=DEVICE)
    slot = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"append wants slots \[B, H, C, ...\] and rows"):
        append(slots, slots, rows[:, :1], rows, slot)
    with pytest.raises(ValueError, match=r"slot \[B\] or \[B, H\]"):
        append(slots, slots, rows, rows, torch.zeros(3).long())
    with pytest.raises(ValueError, match="append has no implementation 'fast'"):
        append(slots, slots, rows, rows, slot, "fast")
    with pytest.raises(ValueError, match="contiguous rows"):
        turned, short = slots.transpose(2, 3), rows[..., :4]
        append(turned, turned, short, short, slot, "triton")
