"""Triton: one program per KV head and chunk of slots; the last one of a KV head compares the chunks and claims the slot."""

import triton
import triton.language as tl
from torch import Tensor, empty, float32, int32, int64

from kernels import need_triton
from kernels.counters import take

# slots per program
CONFIG = {"block": 1024, "num_warps": 4}
# candidates of `python -m kernels.bench --tune --op h2o_update`
TUNE = [
    {"block": block, "num_warps": warps} for block, warps in ((512, 2), (512, 4), (1024, 4), (2048, 4), (2048, 8), (4096, 8))
]


@triton.jit
def h2o_update_kernel(
    scores, positions, logits, lse, lengths, seen, slots, chunk_keys, chunk_slots, arrived, num_slots, num_recent,
    G: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    i_c = tl.program_id(0)
    i_b = tl.program_id(2).to(tl.int64)
    i_bh = i_b * tl.num_programs(1) + tl.program_id(1)
    length = tl.load(lengths + i_b).to(tl.int32)
    now = tl.load(seen + i_b).to(tl.int32)
    o_c = i_c * BLOCK + tl.arange(0, BLOCK)
    filled = o_c < length
    # a mask by length would make every access 4 bytes wide; a chunk behind it is not read at all
    inside = (o_c < num_slots) & (i_c * BLOCK < length)
    at = i_bh * num_slots + o_c
    b_before = tl.load(scores + at, mask=inside, other=0.0)
    age = now - tl.load(positions + at, mask=inside, other=0)
    b_score = b_before
    for g in tl.static_range(G):
        row = i_bh * G + g
        b_logits = tl.load(logits + row * num_slots + o_c, mask=inside, other=float("-inf"))
        b_score += tl.exp2((b_logits - tl.load(lse + row)) * 1.4426950408889634)
    tl.store(scores + at, tl.where(filled, b_score, b_before), mask=inside)

    rank = b_score / age.to(tl.float32) if MEAN else b_score
    rank = tl.where(age > num_recent, rank, float("inf"))
    # scores are not negative: their bits are in their order; the position breaks ties
    key = (rank.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (now - age).to(tl.int64)
    key = tl.where(filled, key, 0x7FFFFFFFFFFFFFFF)
    lowest = tl.min(key, 0)
    slot = tl.min(tl.where(key == lowest, o_c, 0x7FFFFFFF), 0)
    tl.store(chunk_keys + i_bh * NUM_CHUNKS + i_c, lowest)
    tl.store(chunk_slots + i_bh * NUM_CHUNKS + i_c, slot)
    # all threads' scores are written before one thread announces them
    tl.debug_barrier()
    if tl.atomic_add(arrived + i_bh, 1, sem="acq_rel", scope="gpu") == NUM_CHUNKS - 1:
        tl.store(arrived + i_bh, 0)
        o_k = tl.arange(0, CHUNKS)
        p_key = chunk_keys + i_bh * NUM_CHUNKS + o_k
        p_slot = chunk_slots + i_bh * NUM_CHUNKS + o_k
        b_key = tl.load(p_key, mask=o_k < NUM_CHUNKS, other=0x7FFFFFFFFFFFFFFF, cache_modifier=".cg")
        b_slot = tl.load(p_slot, mask=o_k < NUM_CHUNKS, other=0x7FFFFFFF, cache_modifier=".cg")
        claimed = tl.min(tl.where(b_key == tl.min(b_key, 0), b_slot, 0x7FFFFFFF), 0)
        claimed = tl.where(length < num_slots, length, claimed)
        tl.store(slots + i_bh, claimed.to(tl.int64))
        tl.store(scores + i_bh * num_slots + claimed, 0.0)
        tl.store(positions + i_bh * num_slots + claimed, now)


def h2o_update(
    scores: Tensor,
    positions: Tensor,
    logits: Tensor,
    lse: Tensor,
    lengths: Tensor,
    seen: Tensor,
    num_recent: int,
    score: str,
    config: dict | None = None,
) -> Tensor:
    """See api.py."""
    need_triton("h2o_update", scores)
    if logits.dtype != float32 or lse.dtype != float32:
        raise ValueError(f"h2o_update: impl=triton wants fp32 logits and lse, got {logits.dtype}, {lse.dtype}")
    if not all(x.is_contiguous() for x in (scores, positions, logits, lse, lengths, seen)):
        raise ValueError("h2o_update: impl=triton wants contiguous tensors")
    config = CONFIG | (config or {})
    batch, num_kv_heads, num_slots = scores.shape
    num_chunks = triton.cdiv(num_slots, config["block"])
    slots = empty(batch, num_kv_heads, dtype=int64, device=scores.device)
    chunk_keys = empty(batch, num_kv_heads, num_chunks, dtype=int64, device=scores.device)
    chunk_slots = empty(batch, num_kv_heads, num_chunks, dtype=int32, device=scores.device)
    h2o_update_kernel[(num_chunks, num_kv_heads, batch)](
        scores, positions, logits, lse, lengths, seen, slots, chunk_keys, chunk_slots,
        take(batch * num_kv_heads, scores.device), num_slots, num_recent,
        G=logits.shape[1] // num_kv_heads, MEAN=score == "mean", BLOCK=config["block"], NUM_CHUNKS=num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks), num_warps=config["num_warps"],
    )  # fmt: skip
    return slots


def compile_cases() -> list[dict]:
    """Specialisations that the offline sm_90 test compiles."""
    types = dict.fromkeys(("scores", "logits", "lse"), "*fp32") | dict.fromkeys(("num_slots", "num_recent"), "i32")
    types |= {"lengths": "*i64", "seen": "*i64", "slots": "*i64", "chunk_keys": "*i64"}
    names = [arg.name for arg in h2o_update_kernel.params if not arg.is_constexpr]
    return [
        {
            "name": f"h2o-{'mean' if mean else 'sum'}-G{group}", "fn": h2o_update_kernel,
            "signature": {n: types.get(n, "*i32") for n in names},
            "constexprs": {"G": group, "MEAN": mean, "BLOCK": CONFIG["block"], "NUM_CHUNKS": 32, "CHUNKS": 32},
            "num_warps": CONFIG["num_warps"], "num_stages": 1,
            "divisible": [n for n in names if n != "num_recent"], "expect": ["ld.global.v4", "st.global.v4"],
        }
        for group in (1, 4, 7, 8) for mean in (False, True)
    ]  # fmt: skip
