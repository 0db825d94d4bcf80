"""append_quant: a token at a time must leave the bytes that a prompt written at once leaves, and touch nothing else."""

import pytest
import torch

from kernels.append_quant import append_quant
from kernels.quantize import KVFormat, allocate, dequantize, quantize

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
IMPLS = ("reference", "triton")
FORMATS = {
    "int8": KVFormat("int8"),
    "fp8": KVFormat("fp8"),
    "int4": KVFormat("int4"),
    "int4_token": KVFormat("int4_token"),
    "int4-64": KVFormat("int4", group=64),
    "mixed": KVFormat("mixed", head_bits=(8, 4)),
}
OVERWRITING = [name for name, format in FORMATS.items() if format.overwrites]
SEALING = [name for name, format in FORMATS.items() if not format.overwrites]


def make(name, dim, num_slots=512, batch=2):
    return allocate(FORMATS[name], batch, 2, num_slots, dim, torch.float16, DEVICE)


def draw(num, dim, batch=2):
    return [torch.randn(batch, 2, num, dim, device=DEVICE).half() for _ in "kv"]


def held(kv):
    return [x for tensors in kv.tensors().values() for x in tensors]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dim", (64, 128, 256), ids=lambda d: f"D{d}")
@pytest.mark.parametrize("name", SEALING)
def test_tokens_seal_into_the_bytes_of_a_prompt(name, dim, impl):
    if name == "int4-64" and dim == 64:
        pytest.skip("a group of 64 is more than half the head dim")
    # one sequence seals at the third token, the other never
    starts, num = (125, 250), 5
    k, v = draw(260, dim)
    kv, want = make(name, dim), make(name, dim)
    for seq, start in enumerate(starts):
        quantize(kv, seq, 0, k[seq : seq + 1, :, :start], v[seq : seq + 1, :, :start])
        quantize(want, seq, 0, k[seq : seq + 1, :, : start + num], v[seq : seq + 1, :, : start + num])
    before = kv.k_tail.clone()
    for i in range(num):
        slot = torch.tensor(starts, device=DEVICE) + i
        seqs = torch.arange(2, device=DEVICE)
        append_quant(kv, k[seqs, :, slot], v[seqs, :, slot], slot, impl)
    for part, expected in zip(kv.parts, want.parts, strict=True):
        for field in ("k", "v", "k_params", "v_params"):
            actual = getattr(part, field)
            assert actual is None or torch.equal(actual, getattr(expected, field)), field
    assert torch.equal(kv.k_tail[1, :, 122:127], k[1, :, 250:255]) and torch.equal(kv.v_tail[1, :, 122:127], v[1, :, 250:255])
    assert torch.equal(kv.k_tail[0, :, 125:], k[0, :, 125:128]) and torch.equal(kv.k_tail[0, :, :2], k[0, :, 128:130])
    assert torch.equal(kv.k_tail[0, :, 2:125], before[0, :, 2:125]) and torch.equal(kv.k_tail[1, :, 127:], before[1, :, 127:])
    lengths = torch.tensor([start + num for start in starts], device=DEVICE)
    for actual, expected in zip(dequantize(kv, lengths), dequantize(want, lengths), strict=True):
        for seq, length in enumerate(lengths.tolist()):
            assert torch.equal(actual[seq, :, :length], expected[seq, :, :length])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("per_head", (False, True), ids=("slot-B", "slot-BH"))
@pytest.mark.parametrize("dim", (64, 128, 256), ids=lambda d: f"D{d}")
@pytest.mark.parametrize("name", OVERWRITING)
def test_any_slot_can_be_overwritten(name, dim, per_head, impl):
    kv, want = make(name, dim, 70), make(name, dim, 70)
    k, v = draw(70, dim)
    slots = torch.tensor([[69, 0], [33, 31]], device=DEVICE) if per_head else torch.tensor([69, 32], device=DEVICE)
    new_k, new_v = draw(1, dim)
    for seq in range(2):
        quantize(kv, seq, 0, k[seq : seq + 1], v[seq : seq + 1])
    append_quant(kv, new_k[:, :, 0], new_v[:, :, 0], slots, impl)
    for seq in range(2):
        for head in range(2):
            slot = slots[seq, head] if per_head else slots[seq]
            k[seq, head, slot], v[seq, head, slot] = new_k[seq, head, 0], new_v[seq, head, 0]
        quantize(want, seq, 0, k[seq : seq + 1], v[seq : seq + 1])
    for actual, expected in zip(held(kv), held(want), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_of_a_joined_projection(impl):
    kv, want = make("int8", 64), make("int8", 64)
    qkv = torch.randn(2, 6, 64, device=DEVICE).half()
    slot = torch.tensor([3, 400], device=DEVICE)
    append_quant(kv, qkv[:, 2:4], qkv[:, 4:], slot, impl)
    append_quant(want, qkv[:, 2:4].clone(), qkv[:, 4:].clone(), slot)
    for actual, expected in zip(held(kv), held(want), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("int8", "mixed"))
def test_steps_replay_from_a_graph(name):
    kv, want = make(name, 128, 600), make(name, 128, 600)
    k, v = draw(300, 128)
    slot, row_k, row_v = torch.zeros(2, dtype=torch.int64, device=DEVICE), k[:, :, 0].clone(), v[:, :, 0].clone()

    def step():
        append_quant(kv, row_k, row_v, slot, "triton")
        slot.add_(1)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    slot.zero_()
    for i in range(300):
        row_k.copy_(k[:, :, i])
        row_v.copy_(v[:, :, i])
        graph.replay()
    for seq in range(2):
        quantize(want, seq, 0, k[seq : seq + 1], v[seq : seq + 1])
    lengths = torch.tensor([300, 300], device=DEVICE)
    for actual, expected in zip(dequantize(kv, lengths), dequantize(want, lengths), strict=True):
        assert torch.equal(actual[:, :, :300], expected[:, :, :300])


@pytest.mark.gpu
def test_codes_behind_2_to_the_31():
    kv = allocate(KVFormat("int8"), 1, 3, 9 * 2**20, 128, torch.float16, DEVICE)
    want = allocate(KVFormat("int8"), 1, 3, 32, 128, torch.float16, DEVICE)
    k, v = torch.randn(2, 1, 3, 128, device=DEVICE).half()
    append_quant(kv, k, v, torch.tensor([9 * 2**20 - 1], device=DEVICE), "triton")
    append_quant(want, k, v, torch.tensor([31], device=DEVICE))
    assert torch.equal(kv.parts[0].k[:, :, -1], want.parts[0].k[:, :, -1])
    assert torch.equal(kv.parts[0].v[:, :, -1], want.parts[0].v[:, :, -1])
    assert not kv.parts[0].v[:, :, :-1].any()


def test_append_quant_refuses():
    k, v = (x[:, :, 0] for x in draw(1, 64))
    slot = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"slot \[B\] \(int4 fills all KV heads alike\), got \(2, 2\)"):
        append_quant(make("int4", 64), k, v, slot)
    with pytest.raises(ValueError, match=r"wants k, v \(2, 2, 128\), got \(2, 2, 64\)"):
        append_quant(make("int8", 128), k, v, slot)
    with pytest.raises(ValueError, match="no implementation 'fast'"):
        append_quant(make("int8", 64), k, v, slot, "fast")
    odd = allocate(KVFormat("int8"), 2, 2, 32, 16, torch.float16, DEVICE)
    with pytest.raises(ValueError, match="head dims 64, 128 and 256, not 16"):
        append_quant(odd, k[..., :16], v[..., :16], slot, "triton")
