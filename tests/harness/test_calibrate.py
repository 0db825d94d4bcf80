"""Calibration and training on models whose answer is known: measures against loops, choices on planted structure."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from harness import assets, calibrate, hf, models, sensitivity, train_heads
from harness.calibrate import BLOCK, Seen, attention_to, block_shares, choose_layers, fingerprint, iou, kept_by, recall
from harness.cell import run_cell
from harness.config import compose_cells
from harness.models import ByteTokenizer, Loaded
from harness.trainers import sparda as trainer
from methods.scoring import SelectorMLP
from methods.sparda import SparDA
from tasks.base import Sample
from tasks.niah import Niah

NEEDLE = 300  # a token that only the planted layers look at
KNOBS = SparDA(num_sinks=2, window=8, pool=1, predict_layers=[0])


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVGAUGE_CACHE", str(tmp_path / "cache"))
    # the shipped calibration of the checkout must not be touched
    monkeypatch.setattr(assets, "ROOT", tmp_path / "checkout")


def planted(looking, num_layers=6):
    """A model whose layers each see the token embeddings alone; those in `looking` attend to NEEDLE from anywhere."""
    shape = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    config = LlamaConfig(num_hidden_layers=num_layers, vocab_size=512, max_position_embeddings=4096, **shape)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e8}
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.model.embed_tokens.weight[:, :2] = 0
    model.model.embed_tokens.weight[:, 0] = 1  # every token asks
    model.model.embed_tokens.weight[NEEDLE, 1] = 1  # only the needle answers
    for number, layer in enumerate(model.model.layers):
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj, layer.self_attn.q_proj, layer.self_attn.k_proj):
            module.weight.zero_()
        if number in looking:
            # the slowest of the rotary pairs, so that distance hardly matters
            layer.self_attn.q_proj.weight[[7, 23], 0] = 4
            layer.self_attn.k_proj.weight[7, 1] = 4
    return model


class Needles(Niah):
    """Bytes at random with one NEEDLE; the answer is a byte that says nothing."""

    def samples(self, tokenizer, context_len, seed):
        generator = torch.Generator().manual_seed(seed)
        found = []
        for index in range(self.num_samples):
            ids = torch.randint(0, 256, (context_len,), generator=generator).tolist()
            ids[20 + 7 * index : 22 + 7 * index] = [NEEDLE, ord("x")]
            found.append(Sample(f"needle-{index}", ids, answers=["x"], max_answer_tokens=1))
        return found


@pytest.fixture
def loaded(monkeypatch):
    """Make load() give a model of choice, whatever is asked, and niah plant its needles."""

    def use(model):
        monkeypatch.setattr(models, "load", lambda conf, seed=0: Loaded(model, ByteTokenizer(), "planted", 4096))
        monkeypatch.setattr(Niah, "samples", Needles.samples)
        return model

    return use


def words(*more):
    return ["model=dummy", "shape.context_len=150", "task.num_samples=4", "method.pool=1", "method.window=8", *more]


@pytest.mark.parametrize(("looking", "chosen"), (({1, 4}, [1]), ({4, 5}, [4]), ({2, 3, 4}, [2])), ids=("1", "4", "2"))
def test_the_shallowest_layer_that_sees_the_needle_is_chosen(loaded, tmp_path, looking, chosen):
    loaded(planted(looking))
    summary = calibrate.calibrate(words("task.haystack=text", "shape.context_len=100,150"))
    assert summary["predict_layers"] == chosen and summary["recall"] == pytest.approx(1, abs=1e-3)
    found = json.loads(Path(summary["calibration"]).read_text())
    assert [run["context_len"] for run in found["runs"]] == [100, 150]
    for run in found["runs"]:
        assert run["num_samples"] == 4 and run["num_needed"] == 1
        kept = {row["layer"]: row["recall"]["0.8"] for row in run["layers"]}
        assert all(kept[layer] == 1 for layer in looking)
        # a layer that attends evenly keeps the earliest tokens, sometimes the needle by luck
        assert all(value < 1 for layer, value in kept.items() if layer not in looking)
    assert found["sparda"]["settings"]["pool"] == 1 and found["weights"] == "planted"


def test_auto_uses_what_was_written(loaded, tmp_path, capsys):
    model = loaded(planted({1, 4}))
    assert calibrate.main(words("task.haystack=text")) == 0
    out = capsys.readouterr().out
    file = json.loads(out.splitlines()[-1])["calibration"]
    assert "   1 * " in out
    method = SparDA(predict_layers="auto", calibration=file, window=8)
    spec = hf.make_spec(model, batch_size=1, context_len=150, max_new_tokens=4, impl="reference")
    assert method.layers_for(spec) == [1]
    assert assets.find("dummy", None, "calibration.json") == file
    from PIL import Image

    picture = Image.open(Path(file).with_suffix(".png"))
    colours = {colour for _, colour in picture.getcolors(1 << 20)}
    assert picture.width > 1000 and (255, 0, 0) in colours and len(colours) > 9


def test_two_layers_where_none_sees_all():
    """Half of the samples' needles are seen by layer 1, half by layer 2; deep layers need both kinds."""
    samples = []
    for kind in range(4):
        scores, need = torch.rand(6, 100) * 0.01, torch.zeros(6, 100)
        scores[1 + kind % 2, 50], need[4, 50] = 1.0, 0.9
        samples.append(Seen(scores, scores, need, torch.zeros(6, 2), None, None))
    steps = choose_layers([samples[:2], samples[2:]], KNOBS)
    assert steps[-1]["layers"] == [1, 2] and steps[-1]["recall"] == 1
    assert len(choose_layers([samples[::2]], KNOBS)) == 1, "a second layer that adds nothing is not taken"


def test_nothing_needed_is_one_line(loaded, capsys):
    loaded(planted(set()))
    assert calibrate.main(words()) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("error: no prompt token is needed by any deep layer")


def test_recall_and_iou_are_loops():
    generator = torch.Generator().manual_seed(3)
    scores, need = torch.rand(4, 60, generator=generator), torch.rand(4, 60, generator=generator) * 0.12
    seen = Seen(scores, scores, need, torch.zeros(4, 2), None, None)
    deep = [max(need[layer, j] for layer in (2, 3)) for j in range(60)]
    wanted = {j: float(x) for j, x in enumerate(deep) if x >= 0.1 and 2 <= j < 52}
    assert 5 < len(wanted) < 45

    def kept(line, num):
        middle = sorted(range(2, 52), key=lambda j: (-line[j], j))[: num - 10]
        return set(middle)

    for sparsity, num in ((0.5, 30), (0.7, 18), (0.8, 12)):
        own = kept(scores[1].tolist(), num)
        assert recall(seen, [1], sparsity, KNOBS) == pytest.approx(
            sum(x for j, x in wanted.items() if j in own) / sum(wanted.values())
        )
        assert recall(seen, [1], sparsity, KNOBS, weighted=False) == pytest.approx(len(own & set(wanted)) / len(wanted))
        both = kept(torch.maximum(scores[0], scores[3]).tolist(), num)
        assert set(kept_by(scores[[0, 3]].amax(0), sparsity, KNOBS).nonzero()[:, 0].tolist()) - {0, 1, *range(52, 60)} == both
    deepest = kept(torch.maximum(scores[2], scores[3]).tolist(), 12)
    own = kept(scores[1].tolist(), 12)
    assert iou(seen, 1, KNOBS) == pytest.approx(len(own & deepest) / len(own | deepest))
    assert recall(seen, [1], 0.9, KNOBS) is None, "six tokens hold no more than what is always kept"


def test_observe_is_hugging_faces_attention(tiny_llama):
    model = tiny_llama(num_hidden_layers=3)
    ids = torch.randint(0, 512, (70,))
    spec = hf.make_spec(model, batch_size=1, context_len=64, max_new_tokens=1, impl="reference")
    knobs = SparDA(observe=16, pool=3, predict_layers=[0])
    seen = calibrate.observe(model, spec, knobs, ids[:64].tolist(), ids[64:].tolist())
    model.set_attn_implementation("eager")
    weights = model(ids[None], output_attentions=True).attentions
    for layer in range(3):
        last = weights[layer][0, :, 48:64, :64].mean(1).amax(0)
        assert torch.allclose(seen.mass[layer], last, atol=1e-5)
        pooled = torch.stack([last[max(0, j - 1) : j + 2].max() for j in range(64)])
        assert torch.allclose(seen.scores[layer], pooled, atol=1e-5)
        assert torch.allclose(seen.need[layer], weights[layer][0, :, 64:, :64].amax((0, 1)), atol=1e-5)


def test_errors_are_those_of_sensitivity(tiny_llama):
    model, ids = tiny_llama(num_hidden_layers=3), torch.randint(0, 512, (263,)).tolist()
    spec = hf.make_spec(model, batch_size=1, context_len=260, max_new_tokens=1, impl="reference")
    long, short = (calibrate.observe(model, spec, SparDA(predict_layers=[0]), ids[:n], ids[n:]) for n in (260, 255))
    assert short.errors is None, "255 tokens hold no sealed and no newest block"
    expected = sensitivity.measure(model, [ids[:260]])
    assert expected.min() > 0 and torch.allclose(long.errors, expected, rtol=1e-3)
    assert calibrate.sensitivity([long, short]) == [[round(x, 5) for x in layer] for layer in long.errors.tolist()]
    assert calibrate.sensitivity([short]) is None


@pytest.mark.parametrize("length", (100, 128, 300), ids=lambda n: f"T{n}")
def test_block_shares_are_loops(length):
    q, k = torch.randn(4, length, 16) * 3, torch.randn(2, length, 16)
    weights = attention_to(q, k, 0.25)
    expected = torch.einsum("hgtd,hsd->hgts", q.view(2, 2, length, 16), k) * 0.25
    causal = torch.ones(length, length).tril().bool()
    expected = expected.masked_fill(~causal, -torch.inf).softmax(-1).view(4, length, length)
    assert torch.allclose(weights, expected, atol=1e-6)
    used, total = [0, 0], 0
    for head in expected:
        for start in range(0, length, BLOCK):
            rows = head[start : start + BLOCK].mean(0)
            masses = sorted(
                (float(rows[i : i + BLOCK].sum()) for i in range(0, min(start + BLOCK, length), BLOCK)), reverse=True
            )
            total += len(masses)
            for place, share in enumerate((0.95, 0.99)):
                used[place] += next(n for n in range(1, len(masses) + 1) if sum(masses[:n]) >= share or n == len(masses))
    assert block_shares(q, k, 0.25) == pytest.approx([count / total for count in used])


def test_files_lie_where_they_are_read(tmp_path, monkeypatch):
    cached = tmp_path / "cache/model_files/own/calibration.json"
    assert (
        assets.find("own", None, "calibration.json") == str(cached)
        and assets.to_write("own", None, "calibration.json") == cached
    )
    # a shipped model and a model folder: at home, and named relative to the checkout
    for folder in (tmp_path / "checkout/assets/own", tmp_path / "folder"):
        folder.mkdir(parents=True)
    assert assets.find("own", None, "calibration.json") == "assets/own/calibration.json"
    path = str(tmp_path / "folder")
    assert assets.find("other", path, "calibration.json") == f"{path}/calibration.json"
    # what the cache holds comes first, and a newer file at home removes it
    cached.write_text("{}")
    assert assets.find("own", None, "calibration.json") == str(cached)
    assert assets.to_write("own", None, "calibration.json") == tmp_path / "checkout/assets/own/calibration.json"
    assert not cached.exists()
    monkeypatch.setattr(assets.os, "access", lambda *args: False)
    assert assets.to_write("own", None, "calibration.json") == cached


def test_other_parts_of_the_file_stay(tmp_path):
    old, found = tmp_path / "old.json", {"fingerprint": "a", "sparda": {"predict_layers": [1]}, "kv_sensitivity": None}
    assert calibrate.keep_other_parts(found, old) == found
    old.write_text(json.dumps({"fingerprint": "a", "sparda": {"predict_layers": [5]}, "kv_sensitivity": {"0": [0.1]}}))
    assert calibrate.keep_other_parts(found, old) == found | {"kv_sensitivity": {"0": [0.1]}}
    # other weights: nothing of the old file holds
    assert calibrate.keep_other_parts(found | {"fingerprint": "b"}, old)["kv_sensitivity"] is None


def test_fingerprint_is_of_the_weights(tiny_llama):
    one, same, other = tiny_llama(), tiny_llama(), tiny_llama(seed=1)
    assert fingerprint(one) == fingerprint(same) == fingerprint(same.bfloat16()) != fingerprint(other)


@pytest.mark.parametrize(
    ("argv", "message"),
    (
        (["task=speed"], "task=speed has no answers that need the prompt: use task=niah or task=perplexity"),
        (["method=window"], "only method=sparda is calibrated here"),
        (["model=dummy,yi-6b-shape"], "one model at a time"),
        (["method.pol=3"], "unknown key 'method.pol': did you mean method.pool?"),
        (["shape.context_len=37"], "no longer than what sparda keeps anyway"),
    ),
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(loaded, capsys, argv, message):
    loaded(planted({1}))
    head = [] if argv[0].startswith("model=") else ["model=dummy"]
    assert calibrate.main([*head, *argv]) == 2
    err = capsys.readouterr().err
    assert message in err.splitlines()[-1] and err.splitlines()[-1].startswith("error: ")


def test_training_teaches_the_selector(monkeypatch):
    """One head looks hard at decoys, another softly at the needle: pooling keeps decoys, the MLP learns whom to trust."""
    model = planted({1})
    spec = hf.make_spec(model, batch_size=1, context_len=150, max_new_tokens=1, impl="reference")
    method = SparDA(predict_layers=[1], window=8, pool=1)

    def lesson(method, loaded, spec, sample):
        generator = torch.Generator().manual_seed(sample)
        mass = torch.rand(1, 2, 150, generator=generator) * 1e-4
        places = torch.randperm(130, generator=generator) + 5
        mass[0, 0, places[:60]], mass[0, 1, places[60:64]] = 0.02, 0.005
        need = torch.zeros(150)
        need[places[60:64]] = 0.25
        return trainer.Lesson(mass, need)

    monkeypatch.setattr(trainer, "sparda_lesson", lesson)
    _, summary, mlp = trainer.train_sparda(method, None, [(spec, i) for i in range(16)], steps=150)
    assert summary["untrained"]["sparsity 0.7"] == 0 and summary["trained"]["sparsity 0.7"] > 0.95
    assert mlp is not None and summary["samples"] == 16


def test_a_part_that_does_not_help_is_not_written(loaded, capsys):
    """A layer that sees the needle already leaves nothing to learn; nothing is left behind by the attempt."""
    loaded(planted({1, 4}))
    argv = words("task.haystack=text", "task.num_samples=8", "method.predict_layers=[1]")
    assert train_heads.main(["--steps", "10", *argv]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["file"] is None and "nothing written" in captured.err
    assert not assets.to_write("dummy", None, "sparda_mlp.safetensors").exists()
    assert train_heads.main(["--steps", "9", "model=dummy", "method=window"]) == 2
    assert "method=window has no part to train; valid: sparda, hysparse, flash_lite" in capsys.readouterr().err


def test_a_trained_file_is_found_by_the_method(loaded, capsys, monkeypatch):
    model = loaded(planted({1, 4}))
    monkeypatch.setattr(train_heads, "TRAINERS", {"sparda": lambda method, *rest: ("sparda_mlp.safetensors", *trained(method))})

    def trained(method):
        method.predictors, mlp = [1], SelectorMLP(1, 1, method.pool)
        torch.nn.init.normal_(mlp.last.weight)
        return {"measure": "recall", "untrained": {}, "trained": {}, "facts": method.selector_facts()}, mlp

    assert train_heads.main(words("task.haystack=text", "method.predict_layers=[1]")) == 0
    file = json.loads(capsys.readouterr().out.splitlines()[-1])["file"]
    assert file == assets.find("dummy", None, "sparda_mlp.safetensors")
    method = SparDA(predict_layers=[1], pool=1, window=8, selector="mlp", selector_file=file)
    method.bind(hf.make_spec(model, batch_size=1, context_len=400, max_new_tokens=4, impl="reference"))
    assert method.trained and method.flags() == []


@pytest.mark.parametrize("weights", ("random:llama (seed 0)", "others"))
def test_rows_say_which_calibration(tmp_path, monkeypatch, weights):
    """A cell with predict_layers=auto names the file, and is flagged when that was measured on other weights."""
    monkeypatch.chdir(tmp_path)
    file = assets.to_write("dummy", None, "calibration.json")
    shape = {"num_layers": 16, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    file.write_text(json.dumps({"shape": shape, "weights": weights, "sparda": {"predict_layers": [3]}}))
    words = ["model=dummy", "method.predict_layers=auto", "task=speed", "shape=smoke", "shape.num_new_tokens=4", "logger=none"]
    (cfg,) = compose_cells([*words, "task.num_samples=1", "shape.repeats=1", "compare=false", "sparsity=0.5"])
    row = run_cell(cfg, tmp_path / "out", "python run.py")
    assert row.status == "ok" and row.method_facts["predict_layers"] == [3]
    assert (row.method_facts["calibration"], row.method_facts["calibration_weights"]) == (str(file), weights)
    assert ("foreign_calibration" in row.flags) == (weights == "others")
