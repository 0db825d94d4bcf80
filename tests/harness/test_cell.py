"""One cell end to end: what the row says is what happened, and what goes wrong becomes a status and not a finished row."""

import json
import math
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from harness import cell
from harness.config import CONF, register
from harness.results import Row
from methods.full import Full
from methods.window import Window
from tasks.base import Sample
from tasks.multi_turn import MultiTurn
from tasks.niah import Niah


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a cell from overrides in an empty folder; returns its row."""
    monkeypatch.chdir(tmp_path)
    register()

    def go(*overrides: str) -> Row:
        register()
        with initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = compose("config", ["logger=none", "model=dummy", "shape=smoke", *overrides])
        return cell.run_cell(cfg, tmp_path / "out", "python run.py " + " ".join(overrides))

    return go


def saved(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "out" / "row.json").read_text())


def test_row_bytes_are_formulas(run, tmp_path):
    row = run("method=window", "sparsity=0.5", "task=speed", "shape.batch_size=2")
    slot = 16 * 2 * 2 * 16 * 4  # layers, K and V, KV heads, head dim, fp32
    assert row.status == "ok"
    assert row.kv_full_bytes == 2 * 256 * slot and row.kv_resident_bytes == row.kv_predicted_bytes == 2 * 128 * slot
    assert (row.kv_kept_ratio, row.kv_sparsity, row.memory_class) == (0.5, 0.5, "freed")
    assert row.kv_ledger == {"kv": row.kv_resident_bytes} and row.kv_allocated_bytes == row.kv_resident_bytes
    assert row.bound_ms_per_step == pytest.approx(
        (row.kv_read_bytes_per_step + weight_bytes_read(2)) / row.ceiling_gb_per_s / 1e6, rel=1e-6
    )
    assert row.bound_ratio == pytest.approx(row.tpot_ms_p50 / row.bound_ms_per_step)
    assert row.prefill_tokens_per_s > 0 and row.ttft_ms > row.compress_ms > 0
    assert "short_decode" in row.flags and row.num_repeats == 2
    assert saved(tmp_path) == row.to_dict()


def weight_bytes_read(batch):
    """The dummy's parameters by hand: embedding rows of the batch only, since it is not tied."""
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192 + 2 * 64
    return 4 * (16 * layer + 64 + 512 * 64 + batch * 64) + 2 * 8 * 4  # and two buffers of rotary frequencies


def test_full_row_is_reused_and_says_so(run, tmp_path, capsys):
    run("method=window", "sparsity=0.5", "task=speed")
    stored = list((tmp_path / "outputs/rows").glob("*.json"))
    assert sorted(Row.read(path).method for path in stored) == ["full", "window"]
    first = capsys.readouterr().out
    assert "reused" not in first
    row = run("method=streaming_llm", "sparsity=0.5", "task=speed")
    assert "not_interleaved" in row.flags
    assert "reused" in capsys.readouterr().out
    # other code, other machine or other versions: measured again
    path = next(p for p in stored if Row.read(p).method == "full")
    stale = Row.read(path)
    stale.code_hash = "0" * 12
    path.write_text(stale.to_json())
    assert "not_interleaved" not in run("method=streaming_llm", "sparsity=0.6", "task=speed").flags
    path.write_text("{half a row")
    assert run("method=streaming_llm", "sparsity=0.7", "task=speed").status == "ok"


def test_perplexity_of_the_dense_cache_is_hugging_faces(run, tmp_path):
    row = run("method=full", "task=perplexity", "task.num_scored=40", "task.num_samples=2", "shape.batch_size=2")
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", ["model=dummy", "shape=smoke", "task=perplexity", "task.num_scored=40", "task.num_samples=2"])
    from omegaconf import OmegaConf

    from harness import models

    loaded = models.load(OmegaConf.to_object(cfg).model)
    total, count = 0.0, 0
    for sample in OmegaConf.to_object(cfg).task.samples(loaded.tokenizer, 256, 0):
        ids = torch.tensor([sample.prompt_ids + sample.forced_ids])
        logits = loaded.model(ids).logits[0, 255:-1].log_softmax(-1)
        total -= float(logits.gather(1, torch.tensor(sample.forced_ids)[:, None]).sum())
        count += 40
    assert row.perplexity == pytest.approx(math.exp(total / count), rel=1e-4)
    assert row.num_samples == 2 and row.top1_agreement is None


def test_perplexity_reports_fidelity_to_full(run):
    row = run("method=window", "sparsity=0.0", "task=perplexity", "task.num_scored=20", "task.num_samples=2")
    assert (row.top1_agreement, row.kl_nats) == (1.0, pytest.approx(0.0, abs=1e-6)) and "noop" in row.flags
    row = run("method=window", "sparsity=0.9", "task=perplexity", "task.num_scored=20", "task.num_samples=2")
    assert row.kl_nats > 1e-9


@pytest.mark.parametrize("batch", (1, 2, 3, 4))
def test_fidelity_depends_on_neither_batch_nor_repeats(run, batch):
    """Repeats and the samples that fill the last batch must not count."""
    common = ("method=window", "sparsity=0.8", "task=perplexity", "task.num_scored=12", "task.num_samples=2")
    expected = run(*common, "shape.batch_size=1", "shape.repeats=1")
    row = run(*common, f"shape.batch_size={batch}", "shape.repeats=3")
    assert row.kl_nats == pytest.approx(expected.kl_nats, rel=1e-3) and row.top1_agreement == expected.top1_agreement


def test_hidden_question_holds_the_same_bytes_and_is_not_timed(run):
    visible = run("method=window", "sparsity=0.5", "task=niah", "task.num_samples=2")
    hidden = run("method=window", "sparsity=0.5", "task=niah", "task.num_samples=2", "question=hidden")
    assert hidden.kv_resident_bytes == visible.kv_resident_bytes and hidden.kv_full_bytes == visible.kv_full_bytes
    # the question's steps would make 16 decoded tokens look like enough
    assert "short_decode" in hidden.flags and "few_prefills" in hidden.flags


def test_full_command_reproduces_the_full_row():
    own = "python run.py method=sparda method.predict_layers=[1] sparsity=0.7 kv_dtype=int8 'task.name=a b' seed=3"
    assert cell.command_of_full(own) == "python run.py 'task.name=a b' seed=3 method=full"


def test_an_unusable_store_loses_nothing(run, tmp_path, capsys):
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs/rows").touch()
    row = run("method=window", "sparsity=0.5", "task=speed")
    assert row.status == "ok" and saved(tmp_path)["status"] == "ok"
    assert "outputs/rows" in capsys.readouterr().err


def test_answers_count_against_the_context(run):
    from omegaconf import OmegaConf

    with initialize_config_dir(str(CONF), version_base="1.3"):
        limits = ["model.config.max_position_embeddings=300", "task.max_answer_tokens=100", "shape.num_new_tokens=1"]
        cfg = compose("config", ["model=dummy", "method=full", "shape=smoke", *limits])
    OmegaConf.resolve(cfg)
    with pytest.raises(ValueError, match="task.max_answer_tokens=100 is 356 tokens, the model allows 300"):
        cell.check(cfg)


def test_ragged_last_batch_is_not_counted_twice(run):
    row = run("method=full", "task=niah", "task.num_samples=5", "shape.batch_size=2", "shape.repeats=4")
    assert row.num_samples == 5


SMALL = ("model.config.num_hidden_layers=2", "compare=false", "task.num_turns=2", "task.num_facts=2")


def test_turns_are_scored_apart_and_only_decoded_steps_are_timed(run, tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(cell, "percentile", lambda values, share: steps.append(len(values)) or sorted(values)[0])
    # right in the first turn only
    monkeypatch.setattr(MultiTurn, "score", lambda self, turn, text: float(isinstance(turn, Sample)))
    shape = ("shape.context_len=400", "shape.num_new_tokens=5", "shape.repeats=2", "task.num_samples=2")
    row = run("method=full", "task=multi_turn", "question=hidden", *SMALL, "task.max_answer_tokens=4", *shape)
    assert row.status == "ok" and row.accuracy == 0.5
    assert (row.accuracy_by["turn_1"], row.accuracy_by["turn_2"]) == (1.0, 0.0)
    assert set(steps) == {2 * (4 + 5)}, "two samples, each with an answer of 4 tokens and a last one of 5"
    lines = [json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()]
    assert [[turn["score"] for turn in line["turns"]] for line in lines] == [[1.0, 0.0]] * 2
    assert all(line["score"] == 0.5 and len(line["turns"][1]["answers"]) == 1 for line in lines)


def test_answers_do_not_depend_on_the_batch(run, tmp_path):
    common = ("method=window", "sparsity=0.5", "task=multi_turn", *SMALL, "question=hidden", "shape.num_new_tokens=4")
    outputs = []
    for batch in (1, 3):
        row = run(*common, "shape.context_len=400", f"shape.batch_size={batch}", "task.num_samples=3", "shape.repeats=1")
        assert row.status == "ok" and row.num_samples == 3
        lines = (tmp_path / "out/samples.jsonl").read_text().splitlines()
        outputs.append([[turn["output"] for turn in json.loads(line)["turns"]] for line in lines])
    assert outputs[0] == outputs[1]


def test_later_turns_count_against_the_context(run):
    common = ("method=full", "task=multi_turn", *SMALL, "task.num_samples=1", "shape.repeats=1", "shape.num_new_tokens=4")
    limit = "model.config.max_position_embeddings=500"
    row = run(*common, limit, "shape.context_len=400")
    assert row.status == "invalid" and "later turns are" in row.error and "longest here: shape.context_len=" in row.error
    longest = int(row.error.split("=")[-1])
    assert run(*common, limit, f"shape.context_len={longest}").status == "ok"
    assert run(*common, limit, f"shape.context_len={longest + 1}").status == "invalid"


class NanWindow(Window):
    """Broken on purpose: NaN in the cache."""

    def begin_step(self, seen):
        super().begin_step(seen)
        for layer in self.layers:
            layer.slots.v.fill_(math.nan)


class Greedy(Window):
    """Broken on purpose: holds twice what it planned."""

    def bind(self, spec):
        super().bind(spec)
        self.hidden = torch.zeros(self.planned.resident_bytes // 4)


class Crashing(Window):
    def begin_step(self, seen):
        raise KeyError("lost")


def out_of_memory(self, seen):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")


class Hungry(Window):
    begin_step = out_of_memory


@pytest.mark.parametrize(
    ("broken", "status"),
    ((NanWindow, "nan"), (Greedy, "failed"), (Crashing, "failed"), (Hungry, "oom_decode")),
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_failures_are_typed_rows(run, tmp_path, monkeypatch, broken, status):
    real = cell.OmegaConf.to_object

    def swapped(cfg):
        conf = real(cfg)
        if isinstance(getattr(conf, "method", None), Window):
            conf.method = broken(sparsity=0.5)
        return conf

    monkeypatch.setattr(cell.OmegaConf, "to_object", swapped)
    row = run("method=window", "sparsity=0.5", "task=speed")
    assert row.status == status and row.error and "\n" not in row.error
    assert saved(tmp_path)["status"] == status
    assert (tmp_path / "out/traceback.txt").read_text().startswith("Traceback")
    stored = [Row.read(path) for path in (tmp_path / "outputs/rows").glob("*.json")]
    assert [(r.method, r.status) for r in stored] == [("full", "ok")], "the failed side is not stored, full still is"


def test_broken_baseline_is_flagged(run):
    row = run("method=window", "sparsity=0.5", "task=niah", "task.num_samples=2")
    assert "baseline_broken" in row.flags, "random weights cannot answer"


def test_real_model_one_cell(smollm2, tmp_path, monkeypatch):
    """The calibrated layers keep the needle, the shallow ones and the window lose it; depths stay clear of the window."""
    monkeypatch.chdir(tmp_path)
    scores = {}
    from harness.engine import Engine
    from methods.sparda import SparDA

    samples = Niah(num_samples=5).samples(smollm2.tokenizer, 512, 1)[:4]
    for name, method in {
        "full": Full(),
        "deep": SparDA(sparsity=0.8, predict_layers=[14, 15]),
        "shallow": SparDA(sparsity=0.8, predict_layers=[1, 2, 3]),
        "window": Window(sparsity=0.8),
    }.items():
        engine = Engine(smollm2.model, method, batch_size=1, max_prompt_len=512, max_new_tokens=12)
        right = 0
        for sample in samples:
            engine.prefill(torch.tensor([sample.prompt_ids]))
            right += Niah().score(sample, smollm2.tokenizer.decode(engine.decode(12)[0].tolist()))
        scores[name] = right
    assert scores["full"] == 4 and scores["deep"] >= 3
    assert scores["shallow"] < scores["deep"] and scores["window"] == 0
