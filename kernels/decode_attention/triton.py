"""Triton: split-KV decode. One program per sequence, KV head and split; the last one of a KV head joins its splits.

A program holds all query heads of its KV head as rows of one tile, so K and V are read once. Splits follow from the
geometry alone; lengths and lists are read on the device. Log-sum-exps are base 2 inside. Results do not depend on the
order of arrival.
"""

import triton
import triton.language as tl
from torch import Tensor, empty, float32, int32

from kernels import need_triton
from kernels.counters import take

LOG2_E = 1.4426950408889634
MAX_ROWS = 64
MAX_SPLITS = 128
# numbers of the tile that joins splits, per program
MERGE_TILE = 8192
# slots from which one program per multiprocessor with larger tiles streams fastest (H200, D 128)
LONG = 32768

# above so many partial numbers per group of heads a launch of its own, with a program per head, joins faster
MAX_FUSED = 1 << 16

# (mode, padded head dim) -> launch numbers for 16-bit slots. Triton keeps num_stages - 1 blocks in flight, and only half
# as many with a list, whose entries must arrive first. `programs` is what the splits aim at while there are at most 64
# pairs of sequence and KV head, `many` above.
CONFIGS = {
    ("dense", 64): {"block": 128, "num_warps": 4, "num_stages": 3, "programs": 264, "many": 1056},
    ("dense", 128): {"block": 64, "num_warps": 4, "num_stages": 3, "programs": 264, "many": 264},
    ("dense", 256): {"block": 32, "num_warps": 4, "num_stages": 3, "programs": 264, "many": 1056},
    ("index", 64): {"block": 64, "num_warps": 4, "num_stages": 5, "programs": 264, "many": 1056},
    ("index", 128): {"block": 64, "num_warps": 4, "num_stages": 5, "programs": 264, "many": 1056},
    ("index", 256): {"block": 32, "num_warps": 4, "num_stages": 5, "programs": 264, "many": 1056},
}
# candidates of `python -m kernels.bench --tune --op decode_attention` for D 128; each replaces the pinned numbers it names
TUNE = [
    {"block": block, "num_warps": warps, "num_stages": stages, "programs": programs, "fused": fused}
    for block, warps, stages, programs, fused in (
        (64, 4, 3, 264, True),
        (64, 4, 3, 264, False),
        (64, 4, 3, 396, True),
        (64, 4, 3, 528, True),
        (64, 4, 3, 1056, True),
        (64, 4, 4, 264, True),
        (64, 4, 5, 264, True),
        (64, 4, 5, 396, True),
        (64, 4, 5, 1056, True),
        (64, 4, 7, 264, True),
        (32, 4, 5, 396, True),
        (32, 4, 5, 1056, True),
        (32, 4, 7, 264, True),
        (32, 4, 7, 528, True),
        (32, 4, 9, 264, True),
        (128, 8, 3, 132, True),
        (128, 8, 3, 264, True),
    )
]


@triton.jit
def merge_splits(
    partial, partial_lse, out, lse, row, live,
    D: tl.constexpr, BD: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Join the splits of the rows `row` (int64, [ROWS]) of [B * Hq]; other programs wrote them, so L1 is passed over."""
    o_d = tl.arange(0, BD)
    o_s = tl.arange(0, SPLITS)
    b_lse = tl.load(
        partial_lse + row[:, None] * NUM_SPLITS + o_s[None, :], mask=live[:, None] & (o_s < NUM_SPLITS)[None, :],
        other=float("-inf"), cache_modifier=".cg",
    )  # fmt: skip
    peak = tl.max(b_lse, 1)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(b_lse - peak[:, None]), 1)
    acc = tl.zeros([row.shape[0], BD], tl.float32)
    for first in tl.static_range(0, NUM_SPLITS, TILE):
        o_t = first + tl.arange(0, TILE)
        inside = live[:, None] & (o_t < NUM_SPLITS)[None, :]
        at = row[:, None] * NUM_SPLITS + o_t[None, :]  # [ROWS, TILE]
        b_lse = tl.load(partial_lse + at, mask=inside, other=float("-inf"), cache_modifier=".cg")
        b_out = tl.load(
            partial + at[:, :, None] * D + o_d[None, None, :], mask=inside[:, :, None] & (o_d < D)[None, None, :],
            other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        # an empty split wrote no row
        b_out = tl.where((b_lse == float("-inf"))[:, :, None], 0.0, b_out)
        acc += tl.sum(b_out * tl.exp2(b_lse - peak[:, None])[:, :, None], 1)
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    acc = acc / total[:, None]
    p_out = out + row[:, None] * D + o_d[None, :]
    tl.store(p_out, acc.to(out.dtype.element_ty), mask=live[:, None] & (o_d < D)[None, :])
    b_lse = tl.where(nothing, float("-inf"), peak + tl.log2(total))
    tl.store(lse + row, b_lse * 0.6931471805599453, mask=live)


@triton.jit
def decode_kernel(
    q, k, v, lengths, index, index_lens, logits, partial, partial_lse, out, lse, arrived,
    scale, stride_qb, stride_qh, stride_kb, stride_kh, stride_kc, stride_vb, stride_vh, stride_vc,
    stride_ib, stride_ih, num_entries, num_slots,
    G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr, ENTRY: tl.constexpr,
    INDEXED: tl.constexpr, LISTED: tl.constexpr, LOGITS: tl.constexpr, FUSED: tl.constexpr,
    NUM_SPLITS: tl.constexpr, SPLITS: tl.constexpr, MERGE_ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """scale: on base-2 scores. ENTRY: slots per entry of index. LISTED: index_lens is given."""
    TILES: tl.constexpr = (G + ROWS - 1) // ROWS
    i_b = tl.program_id(0).to(tl.int64)
    i_ht = tl.program_id(1)
    i_s = tl.program_id(2)
    i_h = (i_ht // TILES).to(tl.int64)
    num_heads = tl.num_programs(1) // TILES * G
    first_row = (i_ht % TILES) * ROWS
    first_head = i_b * num_heads + i_h * G + first_row
    length = tl.load(lengths + i_b).to(tl.int32)
    if INDEXED:
        if LISTED:
            num_entries = tl.load(index_lens + i_b).to(tl.int32)
        end = num_entries * ENTRY
    else:
        end = length
    num_blocks = tl.cdiv(end, BLOCK)
    start = (num_blocks * i_s // NUM_SPLITS) * BLOCK
    stop = tl.minimum((num_blocks * (i_s + 1) // NUM_SPLITS) * BLOCK, end)

    o_r = tl.arange(0, ROWS)
    o_d = tl.arange(0, BD)
    o_n = tl.arange(0, BLOCK)
    live_rows = o_r < G - first_row
    inside_d = (o_d < D)[None, :]
    p_q = q + i_b * stride_qb + (i_h * G + first_row + o_r)[:, None] * stride_qh + o_d[None, :]
    b_q = tl.load(p_q, mask=live_rows[:, None] & inside_d, other=0.0)  # [ROWS, BD]
    p_k = k + i_b * stride_kb + i_h * stride_kh + o_d[None, :]
    p_v = v + i_b * stride_vb + i_h * stride_vh + o_d[None, :]
    p_index = index + i_b * stride_ib + i_h * stride_ih
    p_logits = logits + (first_head + o_r)[:, None] * num_slots
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BD], tl.float32)
    for n in tl.range(start, stop, BLOCK):
        entry = n + o_n
        if INDEXED:
            slot = tl.load(p_index + entry // ENTRY, mask=entry < stop, other=-1) * ENTRY + entry % ENTRY
            live = (slot >= 0) & (slot < length)
        else:
            slot = entry
            live = entry < stop
        o_slot = slot.to(tl.int64)[:, None]
        b_k = tl.load(p_k + o_slot * stride_kc, mask=live[:, None] & inside_d, other=0.0)  # [BLOCK, BD]
        b_v = tl.load(p_v + o_slot * stride_vc, mask=live[:, None] & inside_d, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale  # [ROWS, BLOCK]
        if LOGITS:
            # a mask by length would make the stores 4 bytes wide
            inside = live_rows[:, None] & (slot < num_slots)[None, :]
            tl.store(p_logits + slot[None, :], b_s * 0.6931471805599453, mask=inside)
        b_s = tl.where(live[None, :], b_s, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(b_s, 1))
        if INDEXED:
            # a block may hold no slot that takes part
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        else:
            base = new_peak
        alpha = tl.exp2(peak - base)
        b_p = tl.exp2(b_s - base[:, None])
        total = total * alpha + tl.sum(b_p, 1)
        acc = tl.dot(b_p.to(b_v.dtype), b_v, acc * alpha[:, None], input_precision="ieee")
        peak = new_peak

    row = first_head + o_r
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    acc = acc / total[:, None]
    b_lse = tl.where(nothing, float("-inf"), peak + tl.log2(total))
    if NUM_SPLITS == 1:
        tl.store(out + row[:, None] * D + o_d[None, :], acc.to(out.dtype.element_ty), mask=live_rows[:, None] & inside_d)
        tl.store(lse + row, b_lse * 0.6931471805599453, mask=live_rows)
    else:
        at = row * NUM_SPLITS + i_s
        if start < stop:
            tl.store(partial + at[:, None] * D + o_d[None, :], acc, mask=live_rows[:, None] & inside_d)
        tl.store(partial_lse + at, b_lse, mask=live_rows)
        if FUSED:
            p_arrived = arrived + i_b * tl.num_programs(1) + i_ht
            # all threads' rows are written before one thread announces them
            tl.debug_barrier()
            if tl.atomic_add(p_arrived, 1, sem="acq_rel", scope="gpu") == NUM_SPLITS - 1:
                tl.store(p_arrived, 0)
                o_m = tl.arange(0, MERGE_ROWS)
                merge_splits(
                    partial, partial_lse, out, lse, first_head + o_m, o_m < G - first_row, D, BD, NUM_SPLITS, SPLITS, TILE
                )


@triton.jit
def merge_kernel(
    partial, partial_lse, out, lse,
    D: tl.constexpr, BD: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    merge_splits(partial, partial_lse, out, lse, row, row >= 0, D, BD, NUM_SPLITS, SPLITS, TILE)


def config_for(mode: str, head_dim: int, num_pairs: int, num_slots: int, itemsize: int, num_rows: int) -> dict:
    """The pinned launch numbers: mode dense or index, num_pairs sequences x KV heads, num_rows of the query tile."""
    config = {"fused": True} | CONFIGS[mode, max(64, triton.next_power_of_2(head_dim))]
    many = config.pop("many")
    if num_pairs > 64:
        config["programs"] = many
    elif mode == "dense" and head_dim == 128 and num_slots >= LONG:
        config |= {"block": 128, "num_warps": 8, "programs": 132}
    if itemsize == 4:
        config["block"] = max(16, config["block"] // 2)
    if num_rows > 32:
        config["num_warps"] = 8
    return config


def plan(mode: str, num_pairs: int, num_slots: int, group: int, head_dim: int, itemsize: int, config: dict | None) -> dict:
    """Launch numbers and constexprs of a geometry; nothing here depends on what tensors hold."""
    rows = min(MAX_ROWS, max(16, triton.next_power_of_2(group)))
    config = config_for(mode, head_dim, num_pairs, num_slots, itemsize, rows) | (config or {})
    block, block_dim = config["block"], max(16, triton.next_power_of_2(head_dim))
    num_programs = num_pairs * triton.cdiv(group, rows)
    num_splits = max(1, min(config["programs"] // num_programs, triton.cdiv(num_slots, block), MAX_SPLITS))
    merge_rows = min(rows, triton.next_power_of_2(group))
    fused = config["fused"] and num_splits * merge_rows * block_dim <= MAX_FUSED
    splits = triton.next_power_of_2(num_splits)
    return {
        "G": group, "D": head_dim, "ROWS": rows, "BD": block_dim, "BLOCK": block, "FUSED": fused,
        "NUM_SPLITS": num_splits, "SPLITS": splits, "MERGE_ROWS": merge_rows,
        "TILE": max(1, min(splits, MERGE_TILE // ((merge_rows if fused else 1) * block_dim))),
        "num_warps": config["num_warps"], "num_stages": config["num_stages"],
    }  # fmt: skip


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    scale: float,
    index: Tensor | None = None,
    index_lens: Tensor | None = None,
    block_size: int = 1,
    logits: Tensor | None = None,
    config: dict | None = None,
) -> tuple[Tensor, Tensor]:
    """See api.py."""
    batch, num_heads, head_dim = q.shape
    num_kv_heads, num_slots = k.shape[1:3]
    need_triton("decode_attention", q)
    if head_dim > 256 or head_dim % 8:
        raise ValueError(f"decode_attention: impl=triton has no head_dim {head_dim} (set impl=reference)")
    if not q.dtype == k.dtype == v.dtype or q.dtype.itemsize not in (2, 4):
        raise ValueError(f"decode_attention: impl=triton wants one 16- or 32-bit dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.stride(2) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        raise ValueError("decode_attention: impl=triton wants q, k and v contiguous along D")
    if index is not None and (index.dtype != int32 or index.stride(2) != 1):
        raise ValueError("decode_attention: impl=triton wants an int32 index, contiguous along N")
    if logits is not None and not (logits.dtype == float32 and logits.is_contiguous()):
        raise ValueError("decode_attention: impl=triton wants contiguous fp32 logits")
    indexed, group = index is not None, num_heads // num_kv_heads
    num_candidates = index.shape[2] * block_size if indexed else num_slots
    mode = "index" if indexed else "dense"
    planned = plan(mode, batch * num_kv_heads, num_candidates, group, head_dim, q.dtype.itemsize, config)
    num_splits, tiles = planned["NUM_SPLITS"], num_kv_heads * triton.cdiv(group, planned["ROWS"])
    out = empty(q.shape, dtype=q.dtype, device=q.device)
    lse = empty(batch, num_heads, dtype=float32, device=q.device)
    partial, partial_lse, arrived = out, lse, lengths
    if num_splits > 1:
        partial = empty(batch, num_heads, num_splits, head_dim, dtype=float32, device=q.device)
        partial_lse = empty(batch, num_heads, num_splits, dtype=float32, device=q.device)
        if planned["FUSED"]:
            arrived = take(batch * tiles, q.device)
    index_strides = (index.stride(0), index.stride(1) if index.shape[1] > 1 else 0) if indexed else (0, 0)
    decode_kernel[(batch, tiles, num_splits)](
        q, k, v, lengths, index if indexed else lengths, lengths if index_lens is None else index_lens,
        lse if logits is None else logits, partial, partial_lse, out, lse, arrived,
        scale * LOG2_E, *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *index_strides,
        index.shape[2] if indexed else 0, num_slots,
        ENTRY=block_size, INDEXED=indexed, LISTED=index_lens is not None, LOGITS=logits is not None, **planned,
    )  # fmt: skip
    if num_splits > 1 and not planned["FUSED"]:
        merge = {name: planned[name] for name in ("D", "BD", "NUM_SPLITS", "SPLITS", "TILE")}
        merge_kernel[(batch * num_heads,)](partial, partial_lse, out, lse, **merge)
    return out, lse


def compile_cases() -> list[dict]:
    """Specialisations that the offline sm_90 test compiles."""
    pointers = {"lengths": "*i64", "index": "*i32", "index_lens": "*i32", "arrived": "*i32", "scale": "fp32"}
    pointers |= dict.fromkeys(("logits", "partial", "partial_lse", "lse"), "*fp32")
    names = [arg.name for arg in decode_kernel.params if not arg.is_constexpr]
    cases = []
    for dtype, mode, head_dim, group in [
        *(("bf16", "dense", d, g) for d in (64, 128, 256) for g in (1, 4, 7, 8)),
        ("fp16", "dense", 128, 4), ("bf16", "logits", 128, 4), ("bf16", "dense", 128, 71), ("bf16", "dense", 96, 4),
        *(("bf16", "index", d, g) for d in (64, 128, 256) for g in (1, 4, 8)), ("bf16", "blocks", 128, 4),
    ]:  # fmt: skip
        indexed = mode in ("index", "blocks")
        planned = plan("index" if indexed else "dense", 8, 32768, group, head_dim, 2, None)
        launch = {name: planned.pop(name) for name in ("num_warps", "num_stages")}
        constexprs = planned | {
            "ENTRY": 64 if mode == "blocks" else 1, "INDEXED": indexed, "LISTED": indexed, "LOGITS": mode == "logits",
        }  # fmt: skip
        signature = {n: f"*{dtype}" if n in ("q", "k", "v", "out") else pointers.get(n, "i32") for n in names}
        cases.append(
            {
                "name": f"decode-{dtype}-{mode}-D{head_dim}-G{group}", "fn": decode_kernel, "signature": signature,
                "constexprs": constexprs, **launch,
                "divisible": [n for n in names if n not in ("scale", "num_entries")],
                "expect": ["cp.async.cg.shared.global", "mma"],
            }
        )  # fmt: skip
    for head_dim, num_splits in ((128, 33), (256, 33), (128, 128), (256, 128)):
        splits = triton.next_power_of_2(num_splits)
        constexprs = {"D": head_dim, "BD": head_dim, "NUM_SPLITS": num_splits, "SPLITS": splits}
        signature = {"partial": "*fp32", "partial_lse": "*fp32", "out": "*bf16", "lse": "*fp32"}
        cases.append(
            {
                "name": f"decode-merge-D{head_dim}-{num_splits}", "fn": merge_kernel, "signature": signature,
                "constexprs": constexprs | {"TILE": min(splits, MERGE_TILE // head_dim)},
                "num_warps": 4, "num_stages": 3, "expect": ["ld.global.cg.v4"],
            }
        )  # fmt: skip
    return cases
