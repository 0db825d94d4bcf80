"""flash_lite: masks against loops, sparse prefill and listed decode against fp64 masked attention, bytes against formulas."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import methods.flash_lite as module
from harness.config import ConfigError, preflight
from harness.conform import dense_error
from harness.engine import Engine
from harness.hf import attach
from harness.masked_dense import record
from harness.models import Loaded
from harness.step_watch import HostWatch, StepWatch
from harness.trainers import flash_lite as trainer
from methods.flash_lite import BLOCK, BlockHead, FlashLite, block_mask, pooled_ends, pooled_keys, pooled_mean, scores_of
from methods.full import Full
from tasks.base import Sample

LAYERS, DIM, NEW = 4, 32, 140
SMALL = dict(dense_layers=1, auto_off=0)
READS = dict(kv_dtype="fp32", prefill_skip=0.0, decode_skip=0.4)


@pytest.fixture(scope="module")
def tiny(tiny_llama):
    def make(group=3):
        heads = {1: 2, 3: 6, 4: 8}[group]
        shape = dict(num_attention_heads=heads, num_key_value_heads=2, head_dim=DIM, hidden_size=heads * 8)
        return tiny_llama(num_hidden_layers=LAYERS, **shape)

    return make


def build(model, method, batch=1, length=700, new=NEW, **options):
    return Engine(model, method, batch_size=batch, max_prompt_len=length, max_new_tokens=new, **options)


def draw(*shape):
    return torch.randint(0, 512, shape)


# choosing blocks


def slow_mask(scores, skip, cap):
    """One head, with loops."""
    n = len(scores)
    kept = [[j <= i for j in range(n)] for i in range(n)]
    for i in range(n):
        free = sorted(range(1, i), key=lambda j: (scores[i][j], j))
        for j in free[: math.floor(skip * (i + 1) + 1e-6)]:
            kept[i][j] = False
    for j in range(n):
        absent = [i for i in range(j, n) if not kept[i][j]]
        share = {i: scores[i][j] - math.log(sum(math.exp(scores[i][c]) for c in range(i + 1))) for i in absent}
        for i in sorted(absent, key=lambda i: -share[i])[: max(0, len(absent) - math.floor(cap * (n - j) + 1e-6))]:
            kept[i][j] = True
    return kept


@pytest.mark.parametrize("cap", (1.0, 0.75, 0.3))
@pytest.mark.parametrize("skip", (0.25, 0.5, 0.99))
@pytest.mark.parametrize("n", (1, 2, 3, 4, 13))
def test_mask_is_the_loops(n, skip, cap):
    scores = torch.randn(3, n, n, dtype=torch.float64)
    mask = block_mask(scores, skip, cap)
    assert mask.tolist() == [slow_mask(head, skip, cap) for head in scores.tolist()]
    assert mask[:, :, 0].all() and mask.diagonal(dim1=1, dim2=2).all() and not mask.triu(1).any()


def test_no_column_starves():
    """A block that every row likes least would be seen by its own row alone."""
    scores = torch.zeros(1, 40, 40)
    scores[:, :, 7] = -9.0
    left_out = lambda cap: int((~block_mask(scores, 0.25, cap)[0, 7:, 7]).sum())  # noqa: E731
    # row 8 may leave out two of its nine blocks, and so on: all 32 later rows would
    assert left_out(1.0) == 32 and left_out(0.5) == math.floor(0.5 * 33)


@pytest.mark.parametrize("length", (1, 127, 128, 129, 300))
def test_pools(length):
    x = torch.randn(2, length, DIM)
    blocks = [x[:, start : start + BLOCK] for start in range(0, length, BLOCK)]
    assert torch.allclose(pooled_mean(x), torch.stack([b.mean(1) for b in blocks], 1), atol=1e-5)
    assert torch.equal(pooled_ends(x), torch.stack([torch.stack([b.amax(1), b.amin(1)]) for b in blocks], 2))


@pytest.mark.parametrize("group", (1, 3))
def test_scores(group):
    """mean: the product of the means. max: no key of a block exceeds it."""
    q, k = torch.randn(2 * group, 5, DIM), torch.randn(2, 300, DIM)
    wide = k.repeat_interleave(group, 0)
    mean, bound = (scores_of(q, pooled_keys(k, pool), 0.5) for pool in ("mean", "max"))
    for block, start in enumerate(range(0, 300, BLOCK)):
        products = q @ wide[:, start : start + BLOCK].mT * 0.5  # [Hq, 5, 128]
        assert torch.allclose(mean[..., block], products.mean(-1), atol=1e-5)
        assert (bound[..., block] >= products.amax(-1) - 1e-5).all()


# prefill


@pytest.mark.parametrize("group", (1, 3, 4), ids=lambda g: f"G{g}")
@pytest.mark.parametrize("length", (513, 640, 700), ids=lambda n: f"T{n}")
def test_prefill_is_masked_attention(tiny, length, group, monkeypatch):
    method = FlashLite(prefill_skip=0.5, skip_cap=1.0, pool="max", **SMALL)
    engine = build(tiny(group), method, length=length, new=4)
    seen, plain = [], module.prefill_attention
    monkeypatch.setattr(module, "prefill_attention", lambda *args, **o: seen.append((args, o)) or plain(*args, **o))
    engine.prefill(draw(1, length))
    assert len(seen) == LAYERS - 2, "the layers between the dense ones attend by lists, the dense ones do not"
    listed = 0
    for layer, ((q, k, v, scale), options) in zip((1, 2), seen, strict=True):
        mask = block_mask(method.block_scores(layer, q, k), 0.5, 1.0)
        tokens = mask.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, :length, :length].tril()
        wide_k, wide_v = (x[0].double().repeat_interleave(group, 0) for x in (k, v))
        logits = (q[0].double() @ wide_k.mT * scale).masked_fill(~tokens, -torch.inf)
        out = plain(q, k, v, scale, **options)[0]
        assert (out - logits.softmax(-1) @ wide_v).abs().max() < 1e-5
        assert (out - plain(q, k, v, scale)[0]).abs().max() > 1e-3, "something was left out"
        listed += int(mask.sum())
    n = -(-length // BLOCK)
    density = listed / (2 * 2 * group * n * (n + 1) / 2)
    facts = method.facts()
    assert facts["prefill_density"] == round(density, 4) < 0.8
    assert facts["prefill_density_all_layers"] == round((density + 1) / 2, 4)
    assert facts["sparsity_off"] is None and facts["masks_skip_work"] is False
    assert facts["sparse_layers"] == [1, 3]


def test_rows_leave_out_what_was_asked(tiny):
    """Without a cap: floor(skip * causal blocks) of every row."""
    method = FlashLite(prefill_skip=0.25, skip_cap=1.0, **SMALL)
    build(tiny(), method, new=4).prefill(draw(1, 700))
    rows = range(1, 7)
    assert method.facts()["prefill_density"] == round(1 - sum(n // 4 for n in rows) / sum(rows), 4)


def test_auto_off(tiny):
    """Below it a prompt is dense to the bit, in a batch too, and the row says so."""
    model, ids = tiny(), draw(2, 700)
    dense = build(model, Full(), batch=2).prefill(ids, [700, 600])
    method = FlashLite(kv_dtype="fp32", prefill_skip=0.5, dense_layers=1, auto_off=700)
    logits = build(model, method, batch=2).prefill(ids, [700, 600])
    assert torch.equal(logits[1], dense[1]) and not torch.allclose(logits[0], dense[0], atol=1e-3)
    assert "1 of 2 prompts attended densely: fewer than auto_off=700 tokens" in method.facts()["sparsity_off"]


def test_nothing_to_skip_is_dense(tiny):
    ids = draw(1, 380)
    method = FlashLite(kv_dtype="fp32", prefill_skip=0.25, **SMALL)
    assert torch.equal(build(tiny(), method, length=380).prefill(ids), build(tiny(), Full(), length=380).prefill(ids))
    assert method.facts()["prefill_density"] == method.facts()["prefill_density_all_layers"] == 1.0


def test_chunks(tiny):
    ids = draw(1, 700)
    method = FlashLite(kv_dtype="fp32", prefill_skip=0.5, **SMALL)
    with pytest.raises(ValueError, match="over a whole prompt.*shape.prefill_chunk=null.*method.auto_off=701"):
        build(tiny(), method, prefill_chunk=256).prefill(ids)
    dense = FlashLite(kv_dtype="fp32", prefill_skip=0.5, dense_layers=1, auto_off=701)
    logits = build(tiny(), dense, prefill_chunk=256).prefill(ids)
    assert (logits - build(tiny(), Full()).prefill(ids)).abs().max() < 1e-4


# decode

MODES = {
    "int4": dict(prefill_skip=0.5),
    "group16": dict(kv_group=16, prefill_skip=0.5),
    "fp32": dict(kv_dtype="fp32", prefill_skip=0.5),
    "turn": dict(kv_dtype="fp32", prefill_skip=0.25, decode_skip=0.4, pool="mean"),
    "turn_max": READS | dict(pool="max"),
    "never": READS | dict(refresh="never"),
}


@pytest.mark.parametrize("mode", MODES)
def test_steps_are_masked_dense(tiny, mode):
    """Logits after a sparse prompt and of every step over the claimed (and listed) slots, ragged, across the end of a block."""
    engine = build(tiny(), FlashLite(**SMALL, **MODES[mode]), batch=3, new=12)
    recording = record(engine, [draw(700), draw(1), draw(635)], draw(3, 12))
    for seq in range(3):
        dense_error(recording, seq)


@pytest.mark.parametrize("mode", ("int4", "turn", "turn_max", "never"))
def test_batch_is_alone(tiny, mode):
    model, lengths, ids = tiny(), [700, 1, 640], draw(3, 700)
    knobs = SMALL | MODES[mode]
    together = build(model, FlashLite(**knobs), batch=3, new=20)
    together.prefill(ids, lengths)
    tokens = together.decode(20)
    alone = build(model, FlashLite(**knobs), new=20)
    for seq, length in enumerate(lengths):
        alone.prefill(ids[seq : seq + 1, :length])
        assert torch.equal(alone.decode(20)[0], tokens[seq])


def noted_lists(layer):
    lists, plain = [], layer.slots.attend
    layer.slots.attend = lambda q, lengths, scale, **o: lists.append((q, o["index"])) or plain(q, lengths, scale, **o)
    return lists


@pytest.mark.parametrize("pool", ("mean", "max"))
def test_turn_reads_what_the_query_likes(tiny, pool):
    """Lists by loops over the true keys, over 140 steps in which a block fills and the next begins."""
    method = FlashLite(**SMALL, **READS, pool=pool)
    engine = build(tiny(), method, batch=2)
    engine.prefill(draw(2, 700), [700, 650])
    engine.decode(NEW)  # what is left behind may not count
    lengths = [700, 690]
    engine.prefill(draw(2, 700), lengths)
    layer = method.layers[1]
    lists, num_read = noted_lists(layer), method.num_read(engine.spec)
    assert num_read == 4  # 6 blocks less two
    for step in range(NEW):
        engine._step()  # not through decode(): the ledger would find what the spy has noted
        if step % 23 and step not in (67, 68, 69):
            continue
        q, index = lists[-1]
        for seq, length in enumerate(lengths):
            used = -(-(length + step + 1) // BLOCK)
            for head in range(2):
                keys = layer.slots.k[seq, head, : length + step + 1]
                own = q[seq, 3 * head : 3 * head + 3]
                worth = []
                for start in range(0, len(keys), BLOCK):
                    block = keys[start : start + BLOCK]
                    if pool == "mean":
                        worth.append(float((own @ block.mean(0)).max()))
                    else:
                        worth.append(float(torch.maximum(own * block.amax(0), own * block.amin(0)).sum(-1).max()))
                forced = {0, used - 2, used - 1}
                rest = sorted((b for b in range(used) if b not in forced), key=lambda b: -worth[b])
                assert index[seq, head].tolist() == sorted(forced | set(rest[: num_read - 3]))
    assert method.facts()["refresh"] == "turn"


def test_never_keeps_the_first_choice(tiny):
    """One list for all turns, and every block after it; turn changes its list."""
    lists = {}
    for refresh in ("never", "turn"):
        torch.manual_seed(3)
        method = FlashLite(**SMALL, **READS, refresh=refresh)
        engine = build(tiny(), method, length=1300)
        engine.prefill(draw(1, 1300))
        noted = noted_lists(method.layers[1])
        for _ in range(NEW):
            engine._step()
        lists[refresh] = [index[0].tolist() for _, index in noted]
    never, turn = lists["never"], lists["turn"]
    num_read = 11 - math.floor(0.4 * 11)
    assert all(step == never[0] for step in never) and len({str(step) for step in turn}) > 1
    for head in never[0]:
        # 1300 tokens end in block 10; 1440 end in block 11
        assert head[num_read:] == [11, -1] and head[0] == 0 and head[num_read - 2 : num_read] == [9, 10]
        assert len(set(head[:num_read])) == num_read


@pytest.mark.parametrize("mode", ("int4", "turn", "turn_max", "never"))
def test_steps_never_wait(tiny, mode):
    """A graph can hold them: no host sync but in the twins of kernels, and the same ops in each step."""
    engine = build(tiny(), FlashLite(**SMALL, **MODES[mode]), batch=2)
    engine.prefill(draw(2, 700), [700, 1])
    engine.decode(2)
    watches = []
    for _ in range(3):
        watches.append(StepWatch())
        with HostWatch(watches[-1]), watches[-1]:
            engine._step()
        assert not watches[-1].waits and watches[-1].ops == watches[0].ops


# bytes


@pytest.mark.parametrize("length", (700, 1024))
@pytest.mark.parametrize("group", (None, 16, 32))
def test_four_bits(tiny, group, length):
    method = FlashLite(kv_group=group, **SMALL)
    engine = build(tiny(), method, batch=2, length=length)
    engine.prefill(draw(2, length))
    rows = LAYERS * 2 * 2 * 2 * (length // BLOCK * BLOCK)  # layers, K and V, batch, heads
    expected = {
        "kv": rows * DIM // 2,
        "scales": rows * DIM // (group or 32) * 4,
        "tail": LAYERS * 2 * 2 * 2 * BLOCK * DIM * 2,
        "tables": LAYERS * 2 * 4,
    }
    kinds = engine.ledger().kinds
    assert {kind: kinds[kind] for kind in expected} == expected == method.planned.ledger
    assert method.memory_class == "freed" and method.full_bytes(engine.spec) == engine.ledger().resident_bytes
    assert method.stored_facts()["kv_bits"] == 4 + 32 / (group or 32)


@pytest.mark.parametrize("mode", ("turn", "turn_max", "never"))
def test_what_a_choice_takes(tiny, mode):
    """Held and read bytes of listed steps: the slots that the lists name, and what names them."""
    method = FlashLite(**SMALL, **MODES[mode])
    engine = build(tiny(), method, batch=2, new=8)
    recording = record(engine, [draw(700), draw(700)], draw(2, 8))
    # pooled keys of 6 blocks, or 4 entries and one for a block that may come
    own = {"turn": 2 * 2 * 6 * DIM * 4, "turn_max": 2 * 2 * 2 * 6 * DIM * 4, "never": 2 * 2 * 5 * 4}[mode]
    assert method.planned.ledger["index"] == 2 * own == engine.ledger().kinds["index"]
    slots = 0
    for trace in recording.layers:
        for step, read in enumerate(trace.read):
            filled = trace.held[step + 1] >= 0
            slots += int((filled if read is None else filled & read).sum())
    assert method.planned.read_bytes == slots * 2 * DIM * 4 // 8 + 2 * own
    assert method.facts()["refresh_bytes_per_step"] == 2 * own
    assert method.memory_class == "reads_less" and not method.planned.noop


def test_head_bits(tiny, tmp_path):
    file = tmp_path / "bits.json"
    file.write_text('{"bits": [[8, 4], [4, 4], [4, 8], [4, 4]]}')
    method = FlashLite(head_bits=str(file), kv_group=16, prefill_skip=0.5, **SMALL)
    engine = build(tiny(), method)
    engine.prefill(draw(1, 700))
    assert engine.ledger().resident_bytes == method.planned.resident_bytes
    assert [format.bits(DIM, 2) for format in method.formats(engine.spec)] == [7.25, 6.0, 7.25, 6.0]


# the trained head


def test_untrained_head_is_the_pool(tiny, tmp_path):
    model, ids = tiny(), draw(1, 700)
    plain = build(model, FlashLite(prefill_skip=0.5, **SMALL)).prefill(ids)
    method = FlashLite(prefill_skip=0.5, selector="head", block_head=str(tmp_path / "none"), **SMALL)
    engine = build(model, method)
    assert torch.equal(engine.prefill(ids), plain) and method.flags() == ["untrained"]
    weights = 4 * 2 * (6 + 3 * 2) * DIM * BlockHead.RANK
    assert engine.ledger().kinds["selector"] == method.planned.ledger["selector"] == weights
    assert method.facts()["block_head"] is None


def test_head_file(tiny, tmp_path):
    file, model, ids = tmp_path / "head.safetensors", tiny(), draw(1, 700)
    head = BlockHead(2, 6, 2, DIM)
    torch.nn.init.normal_(head.q, std=0.5)
    head.save(file, {"dense_layers": 1, "pool": "mean"})
    knobs = dict(prefill_skip=0.5, selector="head", block_head=str(file), pool="mean") | SMALL
    method = FlashLite(**knobs)
    logits = build(model, method).prefill(ids)
    assert method.flags() == [] and method.facts()["block_head"] == str(file)
    assert not torch.allclose(logits, build(model, FlashLite(prefill_skip=0.5, pool="mean", **SMALL)).prefill(ids), atol=1e-3)
    with pytest.raises(ValueError, match="was trained for pool=mean, not max: set method.pool=mean"):
        build(model, FlashLite(**knobs | dict(pool="max")))
    with pytest.raises(ValueError, match="is not for this model's heads"):
        build(tiny(4), FlashLite(**knobs))


def test_training(tiny, tmp_path, monkeypatch):
    """What full attention prefers is planted and no score knows of it: the head finds it, also where it has not seen it."""
    method, layers, n = FlashLite(selector="head", **SMALL), 2, 12
    spec = build(tiny(), method, new=1).spec
    wanted = torch.randn(layers, 6, DIM, 1), torch.randn(layers, 2, 3 * DIM, 1).repeat_interleave(3, 1)

    def planted(*args):
        q, features = torch.randn(layers, 6, n, DIM), torch.randn(layers, 2, n, 3 * DIM)
        logits = (q @ wanted[0]) @ (features.repeat_interleave(3, 1) @ wanted[1]).mT * 0.05
        mass = logits.masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf).softmax(-1)
        return trainer.Lesson(q, features, torch.zeros(layers, 6, n, n), mass)

    monkeypatch.setattr(trainer, "lesson_of", planted)
    samples = [(spec, Sample(str(i), draw(700).tolist())) for i in range(32)]
    name, summary, head = trainer.train_flash_lite(method, None, samples, steps=150)
    for skip, gain in (("0.25", 0.02), ("0.5", 0.05), ("0.75", 0.02)):
        assert summary["trained"][f"prefill_skip {skip}"] > summary["untrained"][f"prefill_skip {skip}"] + gain
    head.save(tmp_path / name, summary["facts"])
    again = BlockHead(layers, 6, 2, DIM)
    again.load(tmp_path / name, method.head_facts())
    assert summary["samples"] == 32 and all(torch.equal(again.state_dict()[key], x) for key, x in head.state_dict().items())
    with pytest.raises(ConfigError, match="3 of 3 samples have more than 384 tokens: use at least 4"):
        trainer.train_flash_lite(method, None, samples[:3], steps=1)


def test_lesson_is_what_prefill_sees(tiny, monkeypatch):
    model, method, ids = tiny(), FlashLite(**SMALL), draw(700)
    engine, seen = build(model, method, new=1), []
    lesson = trainer.lesson_of(method, Loaded(model, None, "random", 4096), engine.spec, Sample("one", ids.tolist()))
    assert torch.allclose(lesson.mass.sum(-1), torch.ones(2, 6, 6)) and not lesson.mass.triu(1).any()
    plain = method.block_scores
    monkeypatch.setattr(method, "block_scores", lambda *args: seen.append(plain(*args)) or seen[-1])
    engine.prefill(ids[None])
    # the second sparse layer already sees what the first left out
    assert torch.allclose(lesson.scores[0], seen[0], atol=1e-5) and lesson.scores.shape == (2, 6, 6, 6)
    assert lesson.features.shape == (2, 2, 6, 3 * DIM) and lesson.q.shape == (2, 6, 6, DIM)


def test_block_mass_and_loss():
    q, k = torch.randn(6, 600, DIM), torch.randn(2, 600, DIM)
    weights = (q @ k.repeat_interleave(3, 0).mT * 0.3).masked_fill(~torch.ones(600, 600).tril().bool(), -torch.inf).softmax(-1)
    mass = trainer.block_mass(q, k, 0.3)
    for i in range(5):
        for j in range(5):
            block = weights[:, i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            assert torch.allclose(mass[:, i, j], block.sum(-1).mean(-1), atol=1e-5)
    # rows 3 and 4 choose among blocks 1 .. i - 1; the best scores are the log of the mass
    best, worse = trainer.loss_of(mass.log(), mass), trainer.loss_of(torch.zeros_like(mass), mass)
    chosen = [mass[:, i, 1:i] for i in (3, 4)]
    expected = sum(-(m * (m / m.sum(-1, keepdim=True)).log()).sum(-1) for m in chosen).mean() / 2
    assert torch.allclose(best, expected, atol=1e-5) and best < worse
    # all that may be left out in rows 3 and 4 is, the first block and the own stay
    kept = (mass[:, 3, 0] + mass[:, 3, 3] + mass[:, 4, 0] + mass[:, 4, 4]).mean() / 2
    assert trainer.kept_mass(mass[None], mass[None], 0.99, 1.0) == pytest.approx(float(kept), abs=1e-5)


# use


@pytest.mark.parametrize(
    ("config", "make"), ((LlamaConfig, LlamaForCausalLM), (Qwen3Config, Qwen3ForCausalLM)), ids=("llama", "qwen3")
)
def test_attach(config, make):
    shape = dict(num_hidden_layers=6, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    model = make(config(**shape, head_dim=32, vocab_size=512, initializer_range=0.125)).eval().requires_grad_(False)
    ids, knobs = draw(1, 700), dict(prefill_skip=0.25, kv_group=32, auto_off=0)
    with attach(model, "flash_lite", **knobs):
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None)
    engine = build(model, FlashLite(**knobs), new=512)
    engine.prefill(ids)
    assert torch.equal(text[:, 700:], engine.decode(8))


def test_sparsity_is_ignored(capsys):
    preflight(["method=flash_lite", "sparsity=0.5", "model=dummy", "task=speed", "logger=none"])
    assert "warning: method=flash_lite ignores sparsity" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("knobs", "message"),
    (
        (dict(pool="median"), "method.pool=median is not one of mean, max"),
        (dict(selector="mlp"), "method.selector=mlp is not one of pool, head"),
        (dict(refresh="always"), "method.refresh=always is not one of turn, never"),
        (dict(prefill_skip=1.0), r"method.prefill_skip=1.0 is outside \[0, 1\)"),
        (dict(skip_cap=0), r"method.skip_cap=0 is outside \(0, 1\]"),
        (dict(dense_layers=-1), "must not be negative"),
        (dict(kv_group=24), "method.kv_group=24 is not one of 16, 32, 64"),
        (dict(kv_group=32, kv_dtype="int8"), "method.kv_group=32 groups 4-bit numbers: use kv_dtype=int4, not int8"),
        (dict(decode_skip=0.5), "decode_skip=0.5 reads lists of slots, and kv_dtype=int4 is read whole.*kv_dtype=bf16"),
        (dict(refresh="never"), "method.refresh=never needs method.decode_skip above 0"),
    ),
    ids=("pool", "selector", "refresh", "skip", "cap", "dense", "group24", "group_int8", "decode_int4", "never_dense"),
)
def test_knobs_are_checked(knobs, message):
    with pytest.raises(ValueError, match=message):
        FlashLite(**knobs)


def test_refusals(tiny):
    with pytest.raises(ValueError, match="are all 4 of this model: use method.dense_layers=1 or less"):
        build(tiny(), FlashLite())
    with pytest.raises(ValueError, match="method.kv_group=64 does not divide head dim 32; use method.kv_group=32"):
        build(tiny(), FlashLite(kv_group=64, **SMALL))
