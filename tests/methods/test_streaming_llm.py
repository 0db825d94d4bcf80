"""streaming_llm: re-rotated sinks and an untouched ring are the whole cache rotated by place, over more than two turns."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from methods.base import Spec
from methods.streaming_llm import StreamingLLM

CONTEXT, DIM, SCALE = 61, 8, 0.4


def rotary(scaling):
    """cos, sin [..., D] in fp64 for positions [...], times an attention scaling as YaRN has it."""

    def cos_sin(positions):
        angles = positions.double()[..., None] * 10000.0 ** -(torch.arange(0, DIM, 2).double() / DIM)
        angles = torch.cat([angles, angles], -1)
        return scaling * angles.cos(), scaling * angles.sin()

    return cos_sin


def rotated(x, positions, scaling):
    """x [H, N, D] at positions [N], in fp64."""
    cos, sin = rotary(scaling)(positions)
    return x.double() * cos + torch.cat([-x[..., DIM // 2 :], x[..., : DIM // 2]], -1).double() * sin


@pytest.mark.parametrize("scaling", (1.0, 1.3), ids=("plain", "yarn"))
@pytest.mark.parametrize("group", (1, 3, 4, 8), ids=lambda g: f"G{g}")
@pytest.mark.parametrize("num_sinks", (1, 4, 7), ids=lambda n: f"sinks{n}")
def test_is_the_whole_cache_rotated_by_place(num_sinks, group, scaling):
    """Ragged batch: one token, fewer than the sinks, fewer than the slots, exactly those, the longest prompt; 2.3 turns."""
    method = StreamingLLM(sparsity=0.6, num_sinks=num_sinks)
    method.bind(
        Spec(
            num_layers=1, num_q_heads=2 * group, num_kv_heads=2, head_dim=DIM, scale=SCALE, batch_size=5, context_len=CONTEXT,
            max_new_tokens=500, dtype=torch.float32, device=torch.device("cpu"),
            rotary=lambda positions: tuple(x.float() for x in rotary(scaling)(positions)),
        )
    )  # fmt: skip
    layer, size = method.layers[0], method.planned.num_slots
    lengths = [1, max(1, num_sinks - 1), size - 1, size, CONTEXT]
    steps = int(2.3 * (size - num_sinks)) + num_sinks
    # without their rotation
    q = torch.randn(5, 2 * group, CONTEXT + steps, DIM)
    k, v = (torch.randn(5, 2, CONTEXT + steps, DIM) for _ in "kv")
    everywhere = torch.arange(CONTEXT + steps)
    true_q, true_k = (torch.stack([rotated(x, everywhere, scaling).float() for x in rows]) for rows in (q, k))
    for seq, length in enumerate(lengths):
        layer.prefill(*(rows[seq : seq + 1, :, :length] for rows in (true_q, true_k, v)), seq)
    seen = torch.tensor(lengths)
    for _ in range(steps):
        method.begin_step(seen)
        rows = (true_q, true_k, v)
        out = layer.decode(*(torch.stack([x[b, :, n] for b, n in enumerate(seen.tolist())])[:, :, None] for x in rows))
        seen = seen + 1
        held = layer.positions(seen)
        for seq, total in enumerate(seen.tolist()):
            cache = list(range(total))
            if total > size:
                cache = cache[:num_sinks] + cache[total - (size - num_sinks) :]
            places = torch.arange(len(cache))
            keys = rotated(k[seq][:, cache], places, scaling)[None]
            query = rotated(q[seq, :, total - 1 : total], places[-1:], scaling)[None]
            values = v[seq : seq + 1, :, cache].double()
            want = scaled_dot_product_attention(query, keys, values, scale=SCALE, enable_gqa=True)[0]
            assert (out[seq] - want).abs().max() < 2e-5, f"{total} tokens"
            assert sorted(j for j in held[seq, 0].tolist() if j >= 0) == cache


def test_the_copy_does_not_drift(tiny_llama):
    """Sinks are rotated from the copy each time, not from what was rotated before: exact after 400 steps."""
    from harness.engine import Engine

    method = StreamingLLM(sparsity=0.6)
    model = tiny_llama(num_hidden_layers=1)
    engine = Engine(model, method, batch_size=1, max_prompt_len=50, max_new_tokens=400, step_impl="fused")
    engine.prefill(torch.randint(0, 512, (1, 50)))
    before = method.copies.clone()
    engine.decode(400)
    assert torch.equal(method.copies, before)
    assert method.layers[0].slots.k[0, :, :4].isfinite().all()


@pytest.mark.parametrize("length", (1, 7))
def test_garbage_is_never_read(garbage_is_never_read, length):
    garbage_is_never_read(StreamingLLM(sparsity=0.6), length)


def test_nan_stays_in_its_sequence(nan_stays_in_its_sequence):
    nan_stays_in_its_sequence(StreamingLLM(sparsity=0.6))


def test_2000_tokens(stays_constant):
    stays_constant(StreamingLLM(sparsity=0.8))
