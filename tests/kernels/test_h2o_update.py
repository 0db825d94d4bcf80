"""h2o_update against a loop in fp64, and a whole run of steps against attention that is recomputed from scratch."""

import pytest
import torch

from kernels.append import append
from kernels.decode_attention import decode_attention
from kernels.h2o_update import h2o_update

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ("reference", "triton")
SMALL = {"block": 16, "num_warps": 1}


def oracle(scores, positions, logits, lse, lengths, seen, num_recent, score):
    """Scores after the step (fp64, before the claim) and slots."""
    scores, logits, lse = (x.cpu().double() for x in (scores, logits, lse))
    group, num_slots = logits.shape[1] // scores.shape[1], scores.shape[2]
    slots = torch.zeros(scores.shape[:2], dtype=torch.int64)
    for seq, used in enumerate(lengths.tolist()):
        for head in range(scores.shape[1]):
            for row in range(head * group, (head + 1) * group):
                scores[seq, head, :used] += torch.exp(logits[seq, row, :used] - lse[seq, row])
            where = {slot: int(positions[seq, head, slot]) for slot in range(used)}
            old = {slot: at for slot, at in where.items() if at < int(seen[seq]) - num_recent}
            if used < num_slots:
                slots[seq, head] = used
            elif old:
                weight = {s: int(seen[seq]) - at if score == "mean" else 1 for s, at in old.items()}
                slots[seq, head] = min(old, key=lambda s: (float(scores[seq, head, s]) / weight[s], old[s]))
            else:
                slots[seq, head] = min(where, key=where.get)
    return scores, slots


def state(lengths, heads, group, num_slots, extra=5):
    """A cache that has dropped `extra` tokens: positions in any order, logits and lse of one step, NaN behind the lengths."""
    batch = len(lengths)
    scores = torch.rand(batch, heads, num_slots)
    positions = torch.stack([torch.randperm(num_slots + extra)[:num_slots] for _ in range(batch * heads)])
    positions = positions.view(batch, heads, num_slots).int()
    logits = torch.randn(batch, heads * group, num_slots) * 3
    lse = torch.stack([logits[b, :, :n].logsumexp(-1) for b, n in enumerate(lengths)])
    for seq, used in enumerate(lengths):
        logits[seq, :, used:], scores[seq, :, used:] = torch.nan, torch.nan
    seen = torch.full((batch,), num_slots + extra)
    return [x.to(DEVICE) for x in (scores, positions, logits, lse, torch.tensor(lengths), seen)]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("score", ("sum", "mean"))
@pytest.mark.parametrize("group", (1, 3, 4, 7, 8), ids=lambda g: f"G{g}")
@pytest.mark.parametrize("num_slots", (1, 15, 16, 17, 64, 65), ids=lambda n: f"n{n}")
def test_update(num_slots, group, score, impl):
    # one sequence is full, one still has room
    scores, positions, *step = state([num_slots, max(1, num_slots - 3)], 2, group, num_slots)
    num_recent = num_slots // 2
    want, want_slot = oracle(scores, positions, *step, num_recent, score)
    moved = positions.clone().scatter_(2, want_slot[..., None].to(DEVICE), num_slots + 5)
    slot = h2o_update(scores, positions, *step, num_recent, score, impl, config=SMALL)
    assert slot.dtype == torch.int64 and torch.equal(slot.cpu(), want_slot)
    want.scatter_(2, want_slot[..., None], 0.0)
    assert torch.allclose(scores.cpu().double(), want, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert torch.equal(positions, moved)


@pytest.mark.parametrize("impl", IMPLS)
def test_ties_take_the_earliest_position_and_recent_ones_stay(impl):
    scores = torch.zeros(1, 1, 40, device=DEVICE)
    positions = torch.arange(39, -1, -1, device=DEVICE)[None, None].int()
    step = [torch.full((1, 2, 40), -torch.inf, device=DEVICE), torch.zeros(1, 2, device=DEVICE)]
    full, seen = torch.tensor([40], device=DEVICE), torch.tensor([40], device=DEVICE)
    for num_recent, want in ((0, 39), (39, 39), (40, 39), (100, 39)):
        case = (scores.clone(), positions.clone(), *step, full, seen, num_recent)
        assert h2o_update(*case, impl=impl, config=SMALL).item() == want
    scores[..., 20:] = 1.0
    # positions 0 .. 19 have score 1, 20 .. 39 have 0 and the newest 20 - n of those are protected
    for num_recent, want in ((0, 19), (19, 19), (20, 39)):
        case = (scores.clone(), positions.clone(), *step, full, seen, num_recent)
        assert h2o_update(*case, impl=impl, config=SMALL).item() == want


@pytest.mark.parametrize("impl", IMPLS)
def test_steps_keep_heavy_and_recent(impl):
    """Decode with a budget of 12: every step equals attention over the tokens a plain list would hold."""
    budget, num_recent, heads, group, dim, steps = 12, 5, 2, 2, 16, 40
    k, v = (torch.randn(steps, heads, dim, device=DEVICE) for _ in "kv")
    q = torch.randn(steps, heads * group, dim, device=DEVICE)
    k_slots, v_slots = (torch.full((1, heads, budget, dim), torch.nan, device=DEVICE) for _ in "kv")
    scores, logits = torch.zeros(1, heads, budget, device=DEVICE), torch.zeros(1, heads * group, budget, device=DEVICE)
    positions = torch.full((1, heads, budget), -1, dtype=torch.int32, device=DEVICE)
    positions[:, :, 0] = 0
    slot = torch.zeros(1, heads, dtype=torch.int64, device=DEVICE)
    held = [{} for _ in range(heads)]
    for step in range(steps):
        append(k_slots, v_slots, k[None, step], v[None, step], slot, impl)
        lengths, seen = torch.tensor([min(step + 1, budget)], device=DEVICE), torch.tensor([step + 1], device=DEVICE)
        out, lse = decode_attention(q[None, step], k_slots, v_slots, lengths, 0.3, impl, logits=logits)
        slot = h2o_update(scores, positions, logits, lse, lengths, seen, num_recent, impl=impl, config=SMALL)
        for head in range(heads):
            held[head][step] = 0.0
            at = list(held[head])
            for row in range(head * group, (head + 1) * group):
                weights = (k[at, head].double() @ q[step, row].double() * 0.3).softmax(0)
                assert (out[0, row] - weights @ v[at, head].double()).abs().max() <= 1e-5
                for position, weight in zip(at, weights.tolist(), strict=True):
                    held[head][position] += weight
            if len(at) == budget:
                old = [position for position in at if position < step + 1 - num_recent]
                del held[head][min(old, key=held[head].get)]
            assert set(positions[0, head].tolist()) - {-1} == set(held[head]) | {step + 1}


@pytest.mark.gpu
@pytest.mark.parametrize("score", ("sum", "mean"))
def test_pinned_on_the_gpu(score):
    scores, positions, *step = state([4097, 4097, 100], 4, 8, 4097)
    want, want_slot = oracle(scores, positions, *step, 2000, score)
    slot = h2o_update(scores, positions, *step, 2000, score, "triton").cpu()
    want.scatter_(2, slot[..., None], 0.0)
    assert torch.allclose(scores.cpu().double(), want, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert torch.equal(slot, want_slot)


def test_refuses():
    scores, positions, *step = (x.cpu() for x in state([4], 1, 2, 4))
    with pytest.raises(ValueError, match="score='max' is not one of sum, mean"):
        h2o_update(scores, positions, *step, 1, "max")
    with pytest.raises(ValueError, match="int32 positions"):
        h2o_update(scores, positions.long(), *step, 1)
    with pytest.raises(ValueError, match=r"scores, positions \[B, Hkv, C\] and logits"):
        h2o_update(scores, positions[..., :2], *step, 1)
    with pytest.raises(ValueError, match="h2o_update has no implementation 'fast'"):
        h2o_update(scores, positions, *step, 1, impl="fast")
