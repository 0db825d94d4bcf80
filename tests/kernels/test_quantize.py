"""Quantised KV: half-step errors, layouts read byte by byte, effective bits counted in bytes, and Triton bit for bit."""

import math
import struct

import pytest
import torch

from kernels.quantize import KVFormat, allocate, dequantize, quantize
from kernels.quantize.reference import decode4, decode8, encode4, encode8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ("reference", "triton")
# KV heads of every cache here: 2
FORMATS = {
    "int8": KVFormat("int8"),
    "fp8": KVFormat("fp8"),
    "int4": KVFormat("int4"),
    "int4-64": KVFormat("int4", group=64),
    "mixed": KVFormat("mixed", head_bits=(4, 8)),
}


def make(name, batch=2, num_slots=384, dim=64, dtype=torch.float16):
    return allocate(FORMATS[name], batch, 2, num_slots, dim, dtype, DEVICE)


def rows(num, dim=64, dtype=torch.float16, spread=1.0):
    """K with channels of different width and place, V, both [1, 2, num, dim]."""
    width, place = torch.rand(dim, device=DEVICE) * 4, torch.randn(dim, device=DEVICE) * 3
    k = (torch.randn(1, 2, num, dim, device=DEVICE) * width + place) * spread
    return k.to(dtype), (torch.randn(1, 2, num, dim, device=DEVICE) * spread).to(dtype)


def snapshot(kv):
    return [x.clone() for held in kv.tensors().values() for x in held]


def half(low, high):
    return struct.unpack("<e", bytes([low & 255, high & 255]))[0]


def half_at(tensor, *index):
    """The fp16 number whose two bytes lie there."""
    return half(*tensor.cpu()[index].reshape(1).view(torch.uint8).tolist())


@pytest.mark.parametrize("spread", (1e-4, 0.01, 1.0, 300.0), ids=lambda s: f"x{s}")
@pytest.mark.parametrize("kind", ("int8", "fp8"))
def test_encode8_is_within_half_a_step(kind, spread):
    x = torch.randn(7, 3, 128) * spread
    codes, step = encode8(x, kind)
    assert codes.dtype == torch.uint8 and step.dtype == torch.float16
    largest = x.abs().amax(-1)
    bound = 0.5 if kind == "int8" else 2**-4 * 448
    levels = 127 if kind == "int8" else 448
    error = (decode8(codes, step, kind) - x).abs()
    assert (error.amax(-1) <= bound * (largest / levels * (1 + 2**-9) + 2**-23)).all()
    if kind == "fp8":
        # three bits of mantissa, down to the subnormal numbers
        assert (error <= 2**-4 * x.abs() + 2**-10 * step.float()[..., None]).all()


@pytest.mark.parametrize("place", (0.0, 3.0, -200.0), ids=lambda p: f"at{p}")
@pytest.mark.parametrize("spread", (1e-4, 0.01, 1.0, 300.0), ids=lambda s: f"x{s}")
def test_encode4_is_within_half_a_step(spread, place):
    x = torch.randn(32, 5) * spread + place
    codes, step, zero = encode4(x, 0)
    assert int(codes.max()) <= 15 and step.shape == zero.shape == (1, 5)
    spacing = (x.amax(0) - x.amin(0)) / 15 * (1 + 2**-9) + 2**-23
    # what fp16 cannot hold, in the zero and in the result
    rounding = 2**-10 * x.abs().amax(0) + 2**-24
    assert ((decode4(codes, step, zero) - x).abs().amax(0) <= 0.5 * spacing + rounding).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FORMATS)
def test_nan_is_not_lost(name, impl):
    kv, (k, v) = make(name, dim=128), rows(128, 128)
    k[0, :, 5, 3], v[0, :, 70, 9] = math.nan, math.nan
    quantize(kv, 0, 0, k, v, impl)
    k, v = dequantize(kv, torch.tensor([128, 0], device=DEVICE))
    assert k[0, :, 5, 3].isnan().all() and v[0, :, 70, 9].isnan().all()
    assert not k[0, :, 127].isnan().any() and not v[0, :, 127].isnan().any()


@pytest.mark.parametrize("name", FORMATS)
def test_every_byte_is_where_it_is_said_to_be(name):
    dim, lengths = 128, (300, 40)
    kv = make(name, dim=dim)
    for seq, num in enumerate(lengths):
        quantize(kv, seq, 0, *rows(num, dim))
    k, v = dequantize(kv, torch.tensor(lengths, device=DEVICE))
    for part in kv.parts:
        for seq, token, channel in ((0, 0, 0), (0, 37, 5), (0, 255, 127), (0, 131, 64), (0, 160, 63)):
            for at, head in enumerate(part.heads):
                if part.kind == "int4":
                    group, low = kv.format.group, channel < 64
                    byte_k = int(part.k[seq, at, token, channel % 64])
                    byte_v = int(part.v[seq, at, token // 32, channel % 64, token % 32])
                    code_k, code_v = (b & 15 if low else b >> 4 for b in (byte_k, byte_v))
                    step, zero = (half_at(part.k_params, seq, at, token // group, i, channel) for i in (0, 1))
                    want_k = zero + step * (64 + code_k)
                    step, zero = (half_at(part.v_params, seq, at, token // 32, i, channel // group, token % 32) for i in (0, 1))
                    want_v = zero + step * (64 + code_v)
                else:
                    byte_k = int(part.k[seq, at, token, channel])
                    byte_v = int(part.v[seq, at, token // 32, channel, token % 32])
                    # an e4m3 byte moved into fp16 is 2^-8 of its number
                    number = (
                        (lambda b: b - 128)
                        if part.kind == "int8"
                        else (lambda b: 256 * half(b << 7, (b & 128) | (b & 127) >> 1))
                    )
                    want_k = number(byte_k) * half_at(part.k_params, seq, at, token, 0)
                    want_v = number(byte_v) * half_at(part.k_params, seq, at, token, 1)
                assert float(k[seq, head, token, channel]) == pytest.approx(want_k, rel=2**-10)
                assert float(v[seq, head, token, channel]) == pytest.approx(want_v, rel=2**-10)


@pytest.mark.parametrize("name", ("int4", "mixed"))
def test_newest_tokens_are_exact(name):
    kv, (k, v) = make(name), rows(300)
    quantize(kv, 1, 0, k, v)
    stored_k, stored_v = dequantize(kv, torch.tensor([0, 300], device=DEVICE))
    assert torch.equal(stored_k[1, :, 256:300], k[0, :, 256:].float())
    assert torch.equal(stored_v[1, :, 256:300], v[0, :, 256:].float())


@pytest.mark.parametrize("dim", (64, 128, 256), ids=lambda d: f"D{d}")
@pytest.mark.parametrize("name", FORMATS)
def test_triton_gives_the_same_bits(name, dim):
    if name == "int4-64" and dim == 64:
        pytest.skip("a group of 64 is more than half the head dim")
    start = 128 if not FORMATS[name].overwrites else 17
    for num in (128, 133):
        k, v = rows(num, dim)
        caches = [make(name, dim=dim) for _ in IMPLS]
        for impl, kv in zip(IMPLS, caches, strict=True):
            quantize(kv, 1, start, k, v, impl)
        for want, actual in zip(*(snapshot(kv) for kv in caches), strict=True):
            assert torch.equal(actual, want)
        assert not caches[0].parts[0].k[0].any(), "another sequence was touched"


@pytest.mark.parametrize("spread", (1e-6, 1e-3, 40.0), ids=lambda s: f"x{s}")
@pytest.mark.parametrize("name", ("int8", "fp8", "int4"))
def test_triton_gives_the_same_bits_at_any_size(name, spread):
    k, v = rows(128, 64, torch.float32, spread)
    k[0, 0, :40], v[0, 1, 3] = 0.0, -0.0
    caches = [make(name) for _ in IMPLS]
    for impl, kv in zip(IMPLS, caches, strict=True):
        quantize(kv, 0, 0, k, v, impl)
    for want, actual in zip(*(snapshot(kv) for kv in caches), strict=True):
        assert torch.equal(actual, want)


@pytest.mark.parametrize(
    ("name", "bits"), [("int8", 8.125), ("fp8", 8.125), ("int4", 5.0), ("int4-64", 4.5), ("mixed", 6.5625)], ids=str
)
def test_effective_bits_counted_in_bytes(name, bits):
    kv = make(name, batch=3, num_slots=1024, dim=128)
    held = kv.tensors()
    sealed = sum(x.untyped_storage().nbytes() for kind in ("kv", "scales") for x in held[kind])
    assert sealed * 8 / (2 * 3 * 2 * 1024 * 128) == bits == FORMATS[name].bits(128, 2)
    for num_slots in (1, 127, 128, 300):
        held = make(name, batch=3, num_slots=num_slots, dim=128).tensors()
        actual = {kind: sum(x.untyped_storage().nbytes() for x in tensors) for kind, tensors in held.items()}
        assert actual == FORMATS[name].held_bytes(3, 2, num_slots, 128)


def test_slots_that_fill_no_tile_or_block():
    assert make("int8", num_slots=33).num_stored == 64
    kv = make("int4", num_slots=200)
    assert (kv.num_stored, kv.num_slots) == (128, 200)
    assert make("int4", num_slots=100).num_stored == 0


@pytest.mark.parametrize(
    ("make_error", "text"),
    [
        (lambda: KVFormat("int3"), "'int3' is not one of fp8, int8, int4, mixed"),
        (lambda: KVFormat("int4", group=48), "group=48 is not one of"),
        (lambda: KVFormat("mixed"), "8 or 4 per KV head"),
        (lambda: KVFormat("int8", head_bits=(8, 8)), "empty otherwise"),
        (lambda: allocate(KVFormat("mixed", head_bits=(4,)), 1, 2, 128, 64, torch.float16, DEVICE), "names 1 heads"),
        (
            lambda: allocate(KVFormat("int4"), 1, 2, 128, 48, torch.float16, DEVICE),
            "group=32 does not divide the head dim 48",
        ),
        (lambda: quantize(make("int4"), 0, 64, *rows(64)), "in blocks of 128, not from slot 64"),
        (lambda: quantize(make("int8"), 0, 300, *rows(85)), "tokens 300 .. 384 do not fit 384 slots"),
        (lambda: quantize(make("int8"), 0, 0, *rows(8, 32)), r"wants k, v \[1, 2, N, 64\]"),
        (
            lambda: quantize(make("int4-64"), 0, 0, *rows(128), "triton"),
            "groups of 32 or 64 that divide half the head dim",
        ),
        (lambda: quantize(make("int8"), 0, 0, *rows(8), "fast"), "no implementation 'fast'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_mistakes_have_one_line(make_error, text):
    with pytest.raises(ValueError, match=text):
        make_error()
