"""Slots in every kv_dtype: bytes are the formula's, and what attention reads is what was written, to the format's precision."""

import dataclasses

import pytest
import torch

import methods
from harness.config import discover
from harness.ledger import HEADROOM, measure
from methods.base import Method, Spec
from methods.slots import DTYPES, KV_DTYPES, KVFormat, QuantSlots, format_of, make_slots

CONTEXTS = (1, 31, 127, 128, 129, 300, 700)
SHAPES = ((64, 1), (64, 3), (128, 1), (128, 3))
QUANT = ("int8", "fp8", "int4")
METHODS = discover(methods, Method)


def spec_of(head_dim=64, num_kv_heads=3, context_len=300, batch_size=2, max_new_tokens=37, num_layers=3, dtype=torch.float32):
    return Spec(
        num_layers=num_layers, num_q_heads=6, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=0.125, batch_size=batch_size,
        context_len=context_len, max_new_tokens=max_new_tokens, dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip


def method_of(name, kv_dtype, sparsity=0.3):
    """The method with knobs that suit small shapes; skips where it stores one dtype only."""
    known = {field.name for field in dataclasses.fields(METHODS[name])}
    knobs = {"kv_dtype": kv_dtype, "sparsity": sparsity, "predict_layers": [0], "window": 4}
    knobs |= {"gate_layer": 0, "dense_layers": 1}
    try:
        return METHODS[name](**{key: value for key, value in knobs.items() if key in known})
    except ValueError as err:
        assert "stores" in str(err)
        pytest.skip(str(err))


def held(tensors):
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", METHODS)
def test_bytes_are_the_formula(name, kv_dtype):
    """Ledger = plan to the byte, over odd shapes; what a budget cannot buy is refused in one line."""
    if METHODS[name].reads_lists is True and kv_dtype not in DTYPES:
        pytest.skip("reads lists of slots, which a quantised cache refuses")
    planned = 0
    for head_dim, num_kv_heads in SHAPES:
        for context_len in CONTEXTS:
            spec = spec_of(head_dim, num_kv_heads, context_len)
            method = method_of(name, kv_dtype)
            try:
                plan = method.plan(spec)
            except ValueError as err:
                assert "\n" not in str(err)
                continue
            planned += 1
            method.bind(spec)
            ledger = measure(method)
            assert {kind: size for kind, size in ledger.kinds.items() if kind != HEADROOM} == plan.ledger
            assert ledger.resident_bytes == plan.resident_bytes
            # what is there for tokens to come, and nothing else, is headroom
            alone = sum(method.held_bytes(spec, plan.num_slots).values()) - sum(method.held_bytes(spec, plan.kept).values())
            assert ledger.kinds.get(HEADROOM, 0) == alone
            if hasattr(method, "budget_bytes") and method.memory_class == "freed" and not plan.noop:
                assert ledger.resident_bytes <= method.budget_bytes(spec)
    assert planned >= len(SHAPES)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_full_is_the_yardstick(kv_dtype):
    """full_bytes, by which sparsity is measured, is what method=full holds."""
    for context_len in CONTEXTS:
        spec = spec_of(context_len=context_len)
        method = method_of("full", kv_dtype)
        method.bind(spec)
        assert measure(method).resident_bytes == method.full_bytes(spec) == spec.full_bytes(kv_dtype)


def test_an_int4_cache_counts_its_tail():
    """By hand: 300 tokens are two sealed blocks at 5 bits and a tail of 128 tokens at 16, which is held whatever it holds."""
    method = method_of("int4", "int4")
    method.bind(spec_of(head_dim=128, num_kv_heads=3, context_len=300, batch_size=2, num_layers=1, max_new_tokens=100))
    rows = 2 * 2 * 3
    want = {"kv": rows * 256 * 64, "scales": rows * 256 * 16, "tail": rows * 128 * 256, "tables": 12}
    assert measure(method).kinds == want | {HEADROOM: rows * 128 * 80}
    assert method.stored_facts() == {"kv_format": "int4", "kv_bits": 5.0}


@pytest.mark.parametrize(
    ("kv_dtype", "length", "want"),
    [
        ("bf16", 300, 2 * 3 * 300 * 256),
        ("int8", 300, 2 * 3 * 300 * 130),
        ("int4", 300, 2 * 3 * (256 * 80 + 44 * 256)),
        ("int4", 127, 2 * 3 * 127 * 256),
    ],
    ids=str,
)
def test_read_bytes_by_hand(kv_dtype, length, want):
    assert format_of(kv_dtype, 128).read_bytes(3, 128, length) == want


def test_a_step_reads_the_mean_of_its_steps():
    spec = spec_of(context_len=127, max_new_tokens=2, num_layers=1, batch_size=1)
    read = format_of("int4", 64).read_bytes
    assert method_of("int4", "int4").plan(spec).read_bytes == (read(3, 64, 128) + read(3, 64, 129)) // 2


def test_a_small_head_dim_has_smaller_groups():
    assert format_of("int4", 80).bits(80) == 6.0 and format_of("int4", 96).bits(96) == 5.0
    with pytest.raises(ValueError, match="wants a head dim that 16 divides, not 40; use kv_dtype=int8"):
        format_of("int4", 40)


# what is written is what is read -------------------------------------------------------------------------------------------


def rows(num, head_dim=64, heads=3, batch=1):
    """K with channels far from zero, and V: [batch, heads, num, head_dim]."""
    place = torch.randn(head_dim) * 2
    return torch.randn(batch, heads, num, head_dim) + place, torch.randn(batch, heads, num, head_dim)


def attention(q, k, v, scale):
    """fp64: q [Hq, D] over k, v [Hkv, N, D] -> [Hq, D]."""
    group = q.shape[0] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    weights = (k @ q.double()[..., None] * scale).softmax(1)
    return (weights.transpose(1, 2) @ v)[:, 0]


def relative(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


# relative RMS of attention's output; measured over 24 draws of these rows: 6e-7, 7e-4, 5e-3, 0.018, 0.078, 0.12, 0.23 at most
NEAR = {"fp32": 1e-6, "fp16": 1.5e-3, "bf16": 1e-2, "int8": 0.03, "fp8": 0.12, "int4": 0.18, "int4_token": 0.35}


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_store_append_attend(kv_dtype):
    """A prompt, then tokens one by one over the end of a block; attention is near the exact one and far from any other."""
    slots = make_slots(2, 3, 300, 64, kv_dtype, "cpu", "reference", torch.float32)
    k, v = rows(290, batch=2)
    starts = (120, 1)
    for seq, start in enumerate(starts):
        slots.store(seq, 0, k[seq : seq + 1, :, :start], v[seq : seq + 1, :, :start])
    q = torch.randn(2, 6, 64)
    for step in range(140):
        slot = torch.tensor(starts) + step
        seqs = torch.arange(2)
        slots.append(k[seqs, :, slot], v[seqs, :, slot], slot)
        if step in (0, 6, 7, 8, 126, 127, 139):
            logits = torch.full((2, 6, 300), -7.0)
            out, lse = slots.attend(q, slot + 1, 0.125, logits=logits)
            for seq, last in enumerate(slot.tolist()):
                own = k[seq, :, : last + 1], v[seq, :, : last + 1]
                assert relative(out[seq], attention(q[seq], *own, 0.125)) < NEAR[kv_dtype]
                assert (logits[seq, :, last + 1 :] == -7).all() and (logits[seq, :, : last + 1] != -7).all()
                assert (lse[seq] - logits[seq, :, : last + 1].logsumexp(-1)).abs().max() < 1e-4


@pytest.mark.parametrize("kv_dtype", ("fp16", "int8", "fp8", "int4_token"))
def test_any_slot_and_its_keys_can_be_overwritten(kv_dtype):
    """A ring, a slot per KV head (h2o) and keys alone (streaming_llm's sinks): the rest stays to the last bit."""
    format = KVFormat(kv_dtype) if kv_dtype == "int4_token" else kv_dtype
    slots = make_slots(2, 3, 45, 64, format, "cpu", "reference", torch.float32)
    k, v = rows(45, batch=2)
    for seq in range(2):
        slots.store(seq, 0, k[seq : seq + 1], v[seq : seq + 1])
    per_head = torch.tensor([[3, 40, 0], [44, 31, 32]])
    new_k, new_v = rows(1, batch=2)
    slots.append(new_k[:, :, 0], new_v[:, :, 0], per_head)
    sinks, _ = rows(4, batch=2)
    slots.overwrite_keys(0, sinks)
    for seq in range(2):
        for head in range(3):
            k[seq, head, per_head[seq, head]], v[seq, head, per_head[seq, head]] = new_k[seq, head, 0], new_v[seq, head, 0]
    k[:, :, :4] = sinks
    want = make_slots(2, 3, 45, 64, format, "cpu", "reference", torch.float32)
    for seq in range(2):
        want.store(seq, 0, k[seq : seq + 1], v[seq : seq + 1])
    for kind, tensors in slots.tensors().items():
        for actual, expected in zip(tensors, want.tensors()[kind], strict=True):
            assert torch.equal(actual, expected), kind
    q = torch.randn(2, 6, 64)
    out, _ = slots.attend(q, torch.tensor([45, 20]), 0.125)
    for seq, length in enumerate((45, 20)):
        assert relative(out[seq], attention(q[seq], k[seq, :, :length], v[seq, :, :length], 0.125)) < NEAR[kv_dtype]


@pytest.mark.parametrize("kv_dtype", QUANT)
def test_nan_shows_and_only_where_it_counts(kv_dtype):
    slots = make_slots(2, 3, 300, 64, kv_dtype, "cpu", "reference", torch.float32)
    k, v = rows(200, batch=2)
    for seq in range(2):
        slots.store(seq, 0, k[seq : seq + 1], v[seq : seq + 1])
    bad = k[:, :, 0].clone()
    bad[0, 1, 5] = torch.nan
    slots.append(bad, v[:, :, 0], torch.tensor([200, 200]))
    q = torch.randn(2, 3, 64)
    out, _ = slots.attend(q, torch.tensor([201, 201]), 0.125)
    assert out[0, 1].isnan().any() and not out[0, 0].isnan().any() and not out[1].isnan().any()
    # the same memory with a shorter prompt: nothing of the old one is read
    slots.store(0, 0, k[:1, :, :20], v[:1, :, :20])
    out, _ = slots.attend(q, torch.tensor([20, 201]), 0.125)
    assert not out.isnan().any()


def test_slots_refuse():
    int4 = make_slots(1, 3, 300, 64, "int4", "cpu", "reference")
    k, v = rows(4)
    with pytest.raises(ValueError, match="overwrite_keys: int4 seals blocks of tokens and overwrites none; use int8 or fp8"):
        int4.overwrite_keys(0, k)
    with pytest.raises(ValueError, match=r"int4 fills all KV heads alike"):
        int4.append(k[:, :, 0], v[:, :, 0], torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="in blocks of 128, not from slot 5"):
        int4.store(0, 5, k, v)
    with pytest.raises(ValueError, match="reads a list of slots, which needs kv_dtype=auto"):
        int4.attend(torch.zeros(1, 3, 64), torch.tensor([4]), 1.0, index=torch.zeros(1, 1, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="not among 40"):
        make_slots(1, 3, 40, 64, "int8", "cpu", "reference").overwrite_keys(38, k)
    with pytest.raises(ValueError, match="head dims 64, 128 and 256, not 80"):
        make_slots(1, 3, 40, 80, "int8", "cpu", "triton", torch.bfloat16)
    with pytest.raises(ValueError, match="wants a 16-bit model, not torch.float32"):
        make_slots(1, 3, 40, 64, "fp8", "cpu", "triton", torch.float32)


def test_a_tail_keeps_the_model_s_16_bits():
    for dtype, want in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float32, torch.float16)):
        slots = make_slots(1, 3, 300, 64, "int4", "cpu", "reference", dtype)
        assert isinstance(slots, QuantSlots) and slots.tensors()["tail"][0].dtype == want
