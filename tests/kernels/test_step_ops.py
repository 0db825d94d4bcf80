"""Fused step ops against transformers' own modules and functions, to one rounding of the dtype."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from kernels.add_rms_norm import add_rms_norm
from kernels.rope_append import rope_append
from kernels.swiglu import swiglu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ("reference", "triton")
# the interpreter's bf16 arithmetic is wrong
DTYPES = (torch.float32, torch.bfloat16) if DEVICE == "cuda" else (torch.float32, torch.float16)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def close(actual, expected):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= TOLERANCE[expected.dtype]


def draw(*shape, dtype):
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("size", (1, 63, 576, 1000), ids=lambda n: f"H{n}")
def test_add_rms_norm(size, impl, dtype):
    x, residual = draw(3, size, dtype=dtype), draw(3, size, dtype=dtype)
    module = LlamaRMSNorm(size, eps=1e-5).to(DEVICE, dtype)
    module.weight.data.copy_(draw(size, dtype=dtype))
    normed, total = add_rms_norm(x, residual, module.weight, 1e-5, impl)
    assert torch.equal(total, residual + x)
    close(normed, module(residual + x).detach())
    alone, same = add_rms_norm(x, None, module.weight, 1e-5, impl)
    close(alone, module(x).detach())
    assert torch.equal(same, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("size", (1, 100, 1536), ids=lambda n: f"I{n}")
def test_swiglu(size, impl, dtype):
    gate_up = draw(2, 2 * size, dtype=dtype) * 4
    close(swiglu(gate_up, impl), torch.nn.functional.silu(gate_up[:, :size]) * gate_up[:, size:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("normed", (False, True), ids=("plain", "qk_norm"))
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), ((9, 3, 64), (4, 4, 16), (7, 1, 128)), ids=str)
def test_rope_append(heads, kv_heads, dim, normed, impl, dtype):
    qkv = draw(3, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = torch.rand(3, dim // 2, device=DEVICE).repeat(1, 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    k_slots, v_slots = draw(3, kv_heads, 5, dim, dtype=dtype), draw(3, kv_heads, 5, dim, dtype=dtype)
    before_k, before_v, slot = k_slots.clone(), v_slots.clone(), torch.tensor([4, 0, 2], device=DEVICE)
    norms = {}
    q, k, v = qkv.view(3, -1, 1, dim).split([heads, kv_heads, kv_heads], 1)
    if normed:
        modules = [LlamaRMSNorm(dim, eps=1e-6).to(DEVICE, dtype) for _ in "qk"]
        for module in modules:
            module.weight.data.copy_(draw(dim, dtype=dtype))
        q, k = modules[0](q).detach(), modules[1](k).detach()
        norms = {"q_norm": modules[0].weight, "k_norm": modules[1].weight, "eps": 1e-6}
    q, k = apply_rotary_pos_emb(q, k, cos[:, None], sin[:, None])
    close(rope_append(qkv, cos, sin, k_slots, v_slots, slot, impl=impl, **norms), q[:, :, 0])
    for seq in range(3):
        before_k[seq, :, slot[seq]] = k_slots[seq, :, slot[seq]]
        before_v[seq, :, slot[seq]] = v[seq, :, 0]
        close(k_slots[seq, :, slot[seq]], k[seq, :, 0])
    assert torch.equal(k_slots, before_k) and torch.equal(v_slots, before_v), "another slot was touched"
