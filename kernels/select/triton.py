"""Triton: one program per row searches for the num_kept-th score, then programs over pieces of rows write the kept positions.

The search counts the scores at or above a pivot, over and over; a row of up to RESIDENT scores stays in registers
meanwhile. It runs over the bits of fp32 in the order of their values, so it ends on the exact score; the next pivot is
guessed from the counts at both ends of its interval, which takes about 12 counts on real scores and never more than 96.
It also counts what each piece of the row keeps, so that the pieces need no order among them. Rows of up to FUSED scores
are one piece, written by the same program.
"""

import triton
import triton.language as tl
from torch import Tensor, empty, int32

# longest row that is held in registers; of a longer one STREAMED scores at a time are read from L2 for each count
RESIDENT = 32768
STREAMED = 8192
FUSED = 2048
# key of what does not compete, below that of -inf
NONE = tl.constexpr(-(2**31))
MINUS_INFINITY = tl.constexpr(-2139095041)
PAST_INFINITY = tl.constexpr(2139095041)
# row length rounded up to a power of two, and the largest -> launch numbers of the search and of the pieces
CONFIGS = {
    512: {"num_warps": 1, "piece": 2048, "piece_warps": 4},
    2048: {"num_warps": 4, "piece": 2048, "piece_warps": 4},
    8192: {"num_warps": 8, "piece": 2048, "piece_warps": 4},
    RESIDENT: {"num_warps": 32, "piece": 2048, "piece_warps": 4},
}
# candidates of `python -m kernels.bench --tune --op select`
TUNE = [
    {"num_warps": warps, "piece": piece, "piece_warps": piece_warps}
    for warps in (16, 32)
    for piece, piece_warps in ((1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8))
]


@triton.jit
def load_keys(p_row, o_t, row_length, num_sinks, recent):
    """Integers in the order of the scores; NONE where the position is forced or does not exist."""
    # masked by the row, not by what of it exists: only a multiple of 16 lets loads be 16 bytes wide
    b_x = tl.load(p_row + o_t, mask=o_t < row_length, other=0.0).to(tl.float32)
    b_bits = b_x.to(tl.int32, bitcast=True)
    # what is negative turns its order around; -0 becomes -1, and is 0
    b_key = b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)
    b_key = tl.where(b_x == 0.0, 0, b_key)
    b_key = tl.where(b_x == b_x, b_key, MINUS_INFINITY)
    return tl.where((o_t >= num_sinks) & (o_t < recent), b_key, NONE)


@triton.jit
def count_of(b_key, p_row, pivot, row_length, num_sinks, recent, HELD: tl.constexpr, BLOCK: tl.constexpr):
    """How many keys are at least `pivot`."""
    if HELD:
        # without a comparison: half the instructions, and the clipped keys are at most 2^31 away from any pivot
        return BLOCK + tl.sum((b_key - pivot) >> 31, 0)
    b_count = (b_key >= pivot).to(tl.int32)
    for start in tl.range(BLOCK, row_length, BLOCK):
        b_next = load_keys(p_row, start + tl.arange(0, BLOCK), row_length, num_sinks, recent)
        b_count += (b_next >= pivot).to(tl.int32)
    return tl.sum(b_count, 0)


@triton.jit
def ends_of(b_key, p_row, low, high, row_length, num_sinks, recent, HELD: tl.constexpr, BLOCK: tl.constexpr):
    """Lowest and highest key in low <= key < high."""
    b_low = tl.where(b_key >= low, b_key, PAST_INFINITY)
    b_high = tl.where(b_key < high, b_key, NONE)
    if not HELD:
        for start in tl.range(BLOCK, row_length, BLOCK):
            b_next = load_keys(p_row, start + tl.arange(0, BLOCK), row_length, num_sinks, recent)
            b_low = tl.minimum(b_low, tl.where(b_next >= low, b_next, PAST_INFINITY))
            b_high = tl.maximum(b_high, tl.where(b_next < high, b_next, NONE))
    return tl.min(b_low, 0), tl.max(b_high, 0)


@triton.jit
def kept_of(b_key, o_t, low, high, length, num_sinks, recent):
    """1 for what stays for sure, 2^16 for what lies between low and high: a piece has fewer than 2^15 positions."""
    b_sure = (b_key >= high) | ((o_t < length) & ((o_t < num_sinks) | (o_t >= recent)))
    b_tie = (b_key >= low) & (b_key < high)
    return tl.where(b_sure, 1, tl.where(b_tie, 1 << 16, 0))


@triton.jit
def write_piece(b_both, o_t, p_kept, num_sure, num_ties, from_ties):
    """Write the positions of a piece that stay, after num_sure and num_ties of the pieces before it."""
    b_before = tl.cumsum(b_both, 0) - b_both
    b_ties_before = num_ties + (b_before >> 16)
    b_keep = (b_both == 1) | ((b_both > 1) & (b_ties_before < from_ties))
    b_slot = num_sure + (b_before & 0xFFFF) + tl.minimum(b_ties_before, from_ties)
    tl.store(p_kept + b_slot, o_t, mask=b_keep)


@triton.jit(do_not_specialize=["num_kept", "num_sinks", "window"])
def search_kernel(
    scores, lengths, kept, state, stride_row, row_length, num_kept, num_sinks, window,
    RAGGED: tl.constexpr, HELD: tl.constexpr, FUSED: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
    NUM_PIECES: tl.constexpr,
):  # fmt: skip
    """state: [rows, 3 + 2 NUM_PIECES] int32: low, high, how many stay between them; per piece, sure ones and ones between."""
    i_row = tl.program_id(0).to(tl.int64)
    length = tl.full([], 0, tl.int32) + row_length
    if RAGGED:
        length = tl.load(lengths + i_row).to(tl.int32)
    p_row = scores + i_row * stride_row
    p_kept = kept + i_row * num_kept
    p_state = state + i_row * (3 + 2 * NUM_PIECES)
    recent = tl.maximum(length - window, 0)
    num_forced = tl.minimum(num_sinks + window, length)
    wanted = tl.minimum(num_kept, length) - num_forced
    o_t = tl.arange(0, BLOCK)
    b_key = load_keys(p_row, o_t, row_length, num_sinks, recent)

    # low <= key < high holds num_low - num_high keys, and the wanted-th highest is one of them
    b_positive = (b_key >= 0).to(tl.int32)
    if not HELD:
        for start in tl.range(BLOCK, row_length, BLOCK):
            b_next = load_keys(p_row, start + o_t, row_length, num_sinks, recent)
            b_positive += (b_next >= 0).to(tl.int32)
    num_positive = tl.sum(b_positive, 0)
    positive = num_positive >= wanted
    low = tl.where(positive, 0, MINUS_INFINITY)
    high = tl.where(positive, PAST_INFINITY, 0)
    num_low = tl.where(positive, num_positive, length - num_forced)
    num_high = tl.where(positive, 0, num_positive)
    if HELD:
        b_near = tl.where(positive, tl.maximum(b_key, -1), tl.minimum(b_key, 0))
    else:
        b_near = b_key
    step = num_low * 0
    slow = num_low * 0
    while (num_low > wanted) & (high - low > 1) & (wanted > 0):
        if (step == 0) | ((step >= 10) & (step % 6 == 4)):
            # the ends move to keys that exist, which costs as much as three counts: equal scores close the interval
            least, most = ends_of(b_near, p_row, low, high, row_length, num_sinks, recent, HELD, BLOCK)
            low = least
            high = most + 1
        if high - low > 1:
            old_width = high - low
            old_size = num_low - num_high
            aim = (num_low - wanted).to(tl.float32) / old_size.to(tl.float32)
            pivot = low + (old_width.to(tl.float32) * aim).to(tl.int32)
            # guesses that gain too little, by keys and by bits, give way to halving
            halve = slow >= 2
            pivot = tl.where(halve, low + (old_width >> 1), pivot)
            pivot = tl.minimum(tl.maximum(pivot, low + 1), high - 1)
            num = count_of(b_near, p_row, pivot, row_length, num_sinks, recent, HELD, BLOCK)
            is_low = num >= wanted
            num_low = tl.where(is_low, num, num_low)
            num_high = tl.where(is_low, num_high, num)
            low = tl.where(is_low, pivot, low)
            high = tl.where(is_low, high, pivot)
            gained = (num_low - num_high <= (old_size >> 2)) | (high - low <= (old_width >> 2))
            slow = tl.where(gained | halve, 0, slow + 1)
        step += 1

    high = tl.where(num_low == wanted, low, high)
    from_ties = wanted - num_high
    if FUSED:
        b_both = kept_of(b_key, o_t, low, high, length, num_sinks, recent)
        write_piece(b_both, o_t, p_kept, 0, 0, from_ties)
    else:
        tl.store(p_state, low)
        tl.store(p_state + 1, high)
        tl.store(p_state + 2, from_ties)
        PER_BLOCK: tl.constexpr = BLOCK // PIECE
        o_p = tl.arange(0, PER_BLOCK)
        for start in tl.range(0, row_length, BLOCK):
            if HELD:
                # keys were clipped to 0 or -1, on the far side of both ends
                b_both = kept_of(b_near, o_t, low, high, length, num_sinks, recent)
            else:
                b_next = load_keys(p_row, start + o_t, row_length, num_sinks, recent)
                b_both = kept_of(b_next, start + o_t, low, high, length, num_sinks, recent)
            b_count = tl.sum(tl.reshape(b_both, [PER_BLOCK, PIECE]), 1)
            at = start // PIECE + o_p
            tl.store(p_state + 3 + at, b_count & 0xFFFF, mask=at < NUM_PIECES)
            tl.store(p_state + 3 + NUM_PIECES + at, b_count >> 16, mask=at < NUM_PIECES)
    if RAGGED:
        for start in tl.range(length, num_kept, BLOCK):
            o_k = start + tl.arange(0, BLOCK)
            tl.store(p_kept + o_k, tl.full([BLOCK], -1, tl.int32), mask=o_k < num_kept)


@triton.jit(do_not_specialize=["num_kept", "num_sinks", "window"])
def write_kernel(
    scores, lengths, kept, state, stride_row, row_length, num_kept, num_sinks, window,
    RAGGED: tl.constexpr, PIECE: tl.constexpr, NUM_PIECES: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    i_p = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    length = tl.full([], 0, tl.int32) + row_length
    if RAGGED:
        length = tl.load(lengths + i_row).to(tl.int32)
    o_t = i_p * PIECE + tl.arange(0, PIECE)
    recent = tl.maximum(length - window, 0)
    b_key = load_keys(scores + i_row * stride_row, o_t, row_length, num_sinks, recent)
    p_state = state + i_row * (3 + 2 * NUM_PIECES)
    o_p = tl.arange(0, PIECES)
    num_sure = tl.sum(tl.load(p_state + 3 + o_p, mask=o_p < i_p, other=0), 0)
    num_ties = tl.sum(tl.load(p_state + 3 + NUM_PIECES + o_p, mask=o_p < i_p, other=0), 0)
    b_both = kept_of(b_key, o_t, tl.load(p_state), tl.load(p_state + 1), length, num_sinks, recent)
    write_piece(b_both, o_t, kept + i_row * num_kept, num_sure, num_ties, tl.load(p_state + 2))


def plan(length: int, config: dict | None = None) -> tuple[dict, dict]:
    """Constexprs and launch numbers of the search and of the pieces."""
    held = length <= RESIDENT
    block = max(128, triton.next_power_of_2(length)) if held else STREAMED
    config = CONFIGS[next(size for size in CONFIGS if min(length, RESIDENT) <= size)] | (config or {})
    piece = min(block, config["piece"])
    pieces = {"PIECE": piece, "NUM_PIECES": triton.cdiv(length, piece)}
    search = {"HELD": held, "FUSED": length <= FUSED, "BLOCK": block, "num_warps": config["num_warps"], **pieces}
    return search, pieces | {"PIECES": triton.next_power_of_2(pieces["NUM_PIECES"]), "num_warps": config["piece_warps"]}


def select(
    scores: Tensor, num_kept: int, num_sinks: int, window: int, lengths: Tensor | None, config: dict | None = None
) -> Tensor:
    """See api.py."""
    length = scores.shape[-1]
    rows = scores.reshape(-1, length)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    search, write = plan(length, config)
    kept = empty(*scores.shape[:-1], num_kept, dtype=int32, device=scores.device)
    state = kept
    if not search["FUSED"]:
        state = empty(len(rows), 3 + 2 * search["NUM_PIECES"], dtype=int32, device=scores.device)
    ragged = lengths is not None
    arguments = [
        rows,
        # one row expanded to many stays a view with stride 0 under reshape
        lengths.reshape(-1).contiguous() if ragged else state,
        kept,
        state,
        rows.stride(0),
        length,
        num_kept,
        num_sinks,
        window,
    ]
    search_kernel[(len(rows),)](*arguments, RAGGED=ragged, **search)
    if not search["FUSED"]:
        write_kernel[(write["NUM_PIECES"], len(rows))](*arguments, RAGGED=ragged, **write)
    return kept


def compile_cases() -> list[dict]:
    """Specialisations that the offline sm_90 test compiles."""
    types = {"scores": "*fp32", "lengths": "*i64", "kept": "*i32", "state": "*i32"}
    cases = []
    for name, length, fn in (
        ("search", 2048, search_kernel),
        ("search", 32768, search_kernel),
        ("search", 131072, search_kernel),
        ("write", 32768, write_kernel),
    ):
        planned = plan(length)[fn is write_kernel]
        num_warps = planned.pop("num_warps")
        names = [arg.name for arg in fn.params if not arg.is_constexpr]
        cases.append(
            {
                "name": f"select-{name}-T{length}", "fn": fn, "signature": {n: types.get(n, "i32") for n in names},
                "constexprs": {"RAGGED": True, **planned}, "num_warps": num_warps, "num_stages": 3,
                "divisible": [*types, "stride_row", "row_length"], "expect": ["ld.global.v4"],
            }
        )  # fmt: skip
    return cases
