"""Chunked prefill: the same cache and logits as in one piece; methods that stream see what they would see token by token."""

import pytest
import torch

from harness.engine import Engine
from methods.full import Full
from methods.int8 import Int8
from methods.sparda import SparDA
from methods.streaming_llm import StreamingLLM
from methods.window import Window
from tests.engine.test_hybrid import hybrid
from tests.engine.test_step import DEVICE, family

FP32_CHUNKS = pytest.mark.skipif(DEVICE != "cpu", reason="no library kernel takes fp32 chunks on a GPU; bf16 is tested there")
LENGTHS = [61, 17, 1]
BUDGET = dict(sparsity=0.5)
METHODS = {
    "full": Full,
    "int8": Int8,
    "window": lambda: Window(**BUDGET),
    "streaming_llm": lambda: StreamingLLM(**BUDGET),
    "sparda-last": lambda: SparDA(**BUDGET, predict_layers=[1], observe=5, window=4),
    "sparda-all": lambda: SparDA(**BUDGET, predict_layers=[1], observe="all", window=4),
}


def run(model, method, chunk, ids):
    engine = Engine(model, method, batch_size=3, max_prompt_len=61, max_new_tokens=12, prefill_chunk=chunk)
    engine.prefill(ids, LENGTHS)
    _, logits = engine.score(ids[:, :12], keep_logits=True)
    return logits, engine.positions(1), engine.ledger()


@FP32_CHUNKS
@pytest.mark.parametrize("chunk", (1, 7, 17, 100), ids=lambda n: f"chunk{n}")
@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_chunks_are_one_piece(make, chunk):
    model, ids = family("qwen3"), torch.randint(0, 512, (3, 61), device=DEVICE)
    expected, positions, ledger = run(model, make(), None, ids)
    actual, held, kinds = run(model, make(), chunk, ids)
    assert torch.equal(held, positions) and kinds.resident_bytes == ledger.resident_bytes
    # 8-bit codes may differ by one step where a key differs in its last bit
    assert (actual - expected).abs().max() < (2e-2 if make is Int8 else 1e-4)


@FP32_CHUNKS
@pytest.mark.parametrize("chunk", (5, 64), ids=lambda n: f"chunk{n}")
def test_hybrid_chunks_are_one_piece(chunk):
    model, ids = hybrid(), torch.randint(0, 512, (3, 61), device=DEVICE)
    expected, actual = (run(model, Full(), size, ids)[0] for size in (None, chunk))
    assert (actual - expected).abs().max() < 1e-4


STREAMS = {
    "window": lambda: Window(sparsity=0.8, prefill="stream"),
    "streaming_llm": lambda: StreamingLLM(sparsity=0.8, prefill="stream"),
    "one sink": lambda: StreamingLLM(sparsity=0.8, prefill="stream", num_sinks=1),
}


@pytest.mark.parametrize("chunk", (6, 20, 33, 300), ids=lambda n: f"chunk{n}")
@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_stream_is_token_by_token(make, chunk):
    """100 tokens through 20 slots; the oracle is the decode path, which has its own tests."""
    model, ids = family("llama"), torch.randint(0, 512, (2, 100), device=DEVICE)
    sizes = dict(batch_size=2, max_prompt_len=100, max_new_tokens=120)
    slow = Engine(model, make(), **sizes)
    slow.prefill(ids[:, :5])
    expected = slow.score(ids[:, 5:])
    fast = Engine(model, make(), **sizes, prefill_chunk=chunk)
    assert (fast.stream(ids)[:, 4:] - expected).abs().max() < 1e-4
    # and decoding goes on alike after a streamed prompt
    following = torch.randint(0, 512, (2, 50), device=DEVICE)
    expected = slow.score(following[:, : 120 - 95])
    fast.prefill(ids)
    assert (fast.score(following[:, : 120 - 95]) - expected).abs().max() < 1e-4
    assert torch.equal(fast.positions(), slow.positions())


def test_stream_is_endless():
    engine = Engine(
        family("llama"), STREAMS["streaming_llm"](), batch_size=1, max_prompt_len=50, max_new_tokens=1, prefill_chunk=16
    )
    before = engine.ledger()
    logprobs = engine.stream(torch.randint(0, 512, (1, 700), device=DEVICE))
    assert logprobs.shape == (1, 699) and torch.isfinite(logprobs).all()
    assert engine.ledger().allocated_bytes == before.allocated_bytes


def test_mistakes():
    sizes = dict(batch_size=1, max_prompt_len=50, max_new_tokens=1)
    ids = torch.randint(0, 512, (1, 50))
    with pytest.raises(ValueError, match="does not evict between chunks"):
        Engine(family("llama"), Window(), **sizes).stream(ids)
    with pytest.raises(ValueError, match="at least 1 token"):
        Engine(family("llama"), Full(), **sizes, prefill_chunk=0)
    with pytest.raises(ValueError, match="first chunk of 3 tokens must hold the 4 sinks"):
        Engine(family("llama"), STREAMS["streaming_llm"](), **sizes, prefill_chunk=3).prefill(ids)
    with pytest.raises(ValueError, match="quantised cache cannot"):
        Engine(family("llama"), Window(prefill="stream", kv_dtype="int8", sparsity=0.3), **sizes).prefill(ids)
    with pytest.raises(ValueError, match="dense, stream"):
        Window(prefill="chunked")


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_chunks_are_one_piece_in_bf16(make):
    model, ids = family("qwen3").bfloat16(), torch.randint(0, 512, (3, 61), device=DEVICE)
    expected, _, ledger = run(model, make(), None, ids)
    actual, _, kinds = run(model, make(), 17, ids)
    assert kinds.resident_bytes == ledger.resident_bytes
    # a rounded score may choose another token: the logits may then differ in a few places, not as a whole
    assert (actual - expected).norm() / expected.norm() < 0.2


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_chunks_bound_the_activations():
    peaks = {}
    for chunk in (None, 256):
        engine = Engine(
            family("llama").bfloat16(), Full(), batch_size=1, max_prompt_len=8192, max_new_tokens=1, impl="triton",
            prefill_chunk=chunk,
        )  # fmt: skip
        ids = torch.randint(0, 512, (1, 8192), device=DEVICE)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.prefill(ids)
        peaks[chunk] = torch.cuda.max_memory_allocated() - before
    assert peaks[256] < peaks[None] / 4
