"""window: a ring is dense attention over the suffix, whatever the prompt's length, over more than two turns."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from harness.engine import Engine
from methods.base import Spec
from methods.streaming_llm import StreamingLLM
from methods.window import Window
from tasks.base import leading_ids
from tasks.corpus import corpus_of

CONTEXT, DIM, SCALE = 41, 8, 0.4


def bound(method, batch, group, kv_dtype=torch.float32):
    """A bound method of one layer with 2 KV heads."""
    method.bind(
        Spec(
            num_layers=1,
            num_q_heads=2 * group,
            num_kv_heads=2,
            head_dim=DIM,
            scale=SCALE,
            batch_size=batch,
            context_len=CONTEXT,
            max_new_tokens=500,
            dtype=kv_dtype,
            device=torch.device("cpu"),
        )
    )
    return method.layers[0]


@pytest.mark.parametrize("group", (1, 3, 4, 8), ids=lambda g: f"G{g}")
@pytest.mark.parametrize("sparsity", (0.9, 0.83, 0.5, 0.03), ids=lambda s: f"sparsity{s}")
def test_ring_is_the_suffix(sparsity, group):
    """Ragged batch: one token, fewer than the ring, exactly the ring, more than it; 2.3 turns of decoding."""
    method = Window(sparsity=sparsity)
    layer = bound(method, 5, group)
    size = method.planned.num_slots
    assert size == {0.9: 4, 0.83: 6, 0.5: 20, 0.03: 39}[sparsity]
    lengths = [1, size - 1, size, size + 1, CONTEXT]
    steps = int(2.3 * size) + 1
    q = torch.randn(5, 2 * group, CONTEXT + steps, DIM)
    k, v = (torch.randn(5, 2, CONTEXT + steps, DIM) for _ in "kv")
    for seq, length in enumerate(lengths):
        prompt = [rows[seq : seq + 1, :, :length] for rows in (q, k, v)]
        dense = scaled_dot_product_attention(*(x.double() for x in prompt), is_causal=True, scale=SCALE, enable_gqa=True)
        assert (layer.prefill(*prompt, seq) - dense).abs().max() < 1e-5
    seen = torch.tensor(lengths)
    for _ in range(steps):
        method.begin_step(seen)
        new = [torch.stack([rows[b, :, n] for b, n in enumerate(seen.tolist())])[:, :, None] for rows in (q, k, v)]
        out = layer.decode(*new)
        seen = seen + 1
        held = layer.positions(seen)
        for seq, total in enumerate(seen.tolist()):
            suffix = slice(max(0, total - size), total)
            rows = [x[seq : seq + 1, :, suffix].double() for x in (k, v)]
            want = scaled_dot_product_attention(new[0][seq : seq + 1].double(), *rows, scale=SCALE, enable_gqa=True)
            assert (out[seq] - want[0]).abs().max() < 1e-5, f"{total} tokens"
            positions = sorted(j for j in held[seq, 0].tolist() if j >= 0)
            assert positions == list(range(total))[suffix]
            # and the rows lie where positions() says
            slot = held[seq, 0].argmax()
            assert torch.equal(layer.slots.k[seq, :, slot], k[seq, :, total - 1])


@pytest.mark.parametrize("length", (1, 7))
def test_garbage_is_never_read(garbage_is_never_read, length):
    garbage_is_never_read(Window(sparsity=0.6), length)


def test_nan_stays_in_its_sequence(nan_stays_in_its_sequence):
    nan_stays_in_its_sequence(Window(sparsity=0.6))


def test_2000_tokens(stays_constant):
    stays_constant(Window(sparsity=0.8))


@pytest.mark.slow
def test_without_sinks_a_stream_is_lost(smollm2):
    """Running text of eight times the cache: streaming_llm stays flat, window is worse in every part once it evicts."""
    corpus, lead = corpus_of(smollm2.tokenizer), leading_ids(smollm2.tokenizer)
    ids = torch.tensor([lead + corpus.running_ids(1025 - len(lead), 0)])
    losses = []
    for cls in (StreamingLLM, Window):
        method = cls(prefill="stream", sparsity=0.5)
        engine = Engine(smollm2.model, method, batch_size=1, max_prompt_len=256, max_new_tokens=1)
        losses.append(-engine.stream(ids)[0].view(8, 128).mean(1))
        assert method.planned.num_slots <= 128
    sinks, none = losses
    assert sinks[4:].mean() < sinks[:4].mean() + 0.3
    assert (none[1:] > sinks[1:] + 0.3).all()
