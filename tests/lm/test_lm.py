"""EngineLM against lm-eval's own Hugging Face model: with the full cache every number is the same."""

import dataclasses

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import methods
from harness.config import discover
from harness.engine import Engine
from harness.lm import EngineLM
from methods.base import Budgeted, Method
from methods.full import Full
from methods.window import Window
from tests.lm.conftest import DOCS, TEXT

LONG = " ".join(TEXT * 6)


def instances(kind, *arguments):
    return [Instance(kind, {}, args, number) for number, args in enumerate(arguments)]


@pytest.fixture
def hflm(loaded):
    return HFLM(pretrained=loaded[0], tokenizer=loaded[1], batch_size=1, device="cpu")


def engine_lm(loaded, method=None, **options):
    return EngineLM(loaded[0], method or Full(), loaded[1], **options)


PAIRS = [
    (TEXT[0], " yes"),
    (TEXT[0], " a longer answer of several tokens"),
    (TEXT[0], " a longer reply"),
    (TEXT[0] + " ", "trailing space"),
    ("", "nothing before it"),
    ("", "<s>"),
    ("<s>" + TEXT[1], " brings its own BOS"),
    ("x", "y"),
    (LONG, " cut from the left"),
]


def test_loglikelihood_is_lm_evals(loaded, hflm):
    pairs = [pair for pair in PAIRS if pair != ("", "<s>")]
    ours, theirs = (lm.loglikelihood(instances("loglikelihood", *pairs)) for lm in (engine_lm(loaded), hflm))
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-3)


def test_greedy_continuations_are_recognised(loaded, hflm):
    text = hflm.generate_until(instances("generate_until", (TEXT[0], {"until": [], "max_gen_toks": 6})))[0]
    ours, theirs = (lm.loglikelihood(instances("loglikelihood", (TEXT[0], text))) for lm in (engine_lm(loaded), hflm))
    assert ours[0][1] == theirs[0][1]
    ids = loaded[1].encode(TEXT[0])
    with torch.no_grad():
        best = int(loaded[0](torch.tensor([ids])).logits[0, -1].argmax())
    scored = [engine_lm(loaded)._score_continuations(ids, [[token]])[0] for token in (best, (best + 1) % 400)]
    assert [greedy for _, greedy in scored] == [True, False]


@pytest.mark.parametrize("context_len", (7, 1000))
def test_rolling_is_lm_evals(loaded, hflm, context_len):
    texts = [(TEXT[0],), (LONG[:1500],), ("a",)]
    assert len(engine_lm(loaded)._windows(LONG[:1500])) == 2
    ours = engine_lm(loaded, context_len=context_len).loglikelihood_rolling(instances("loglikelihood_rolling", *texts))
    theirs = hflm.loglikelihood_rolling(instances("loglikelihood_rolling", *texts))
    assert ours == pytest.approx(theirs, rel=1e-5)


GENERATIONS = [
    (TEXT[0], {"until": [], "max_gen_toks": 30}),
    (TEXT[1], {"until": ["e", "zz"], "max_gen_toks": 40}),
    (TEXT[2], {"until": "\n", "max_new_tokens": 9, "do_sample": False, "temperature": 0.0}),
    ("<s>" + TEXT[3], {"until": ["</s>"], "max_gen_toks": 25}),
    (LONG, {"until": ["q"], "max_gen_toks": 12}),
]


def test_generation_is_lm_evals(loaded, hflm):
    requests = instances("generate_until", *GENERATIONS)
    assert engine_lm(loaded).generate_until(requests) == hflm.generate_until(requests)


def test_every_stop_ends_where_lm_eval_ends(loaded, hflm):
    """Stop at each string of a known output in turn, at ids of the model's EOS set, and across token borders."""
    free = hflm.generate_until(instances("generate_until", (TEXT[0], {"until": [], "max_gen_toks": 24})))[0]
    stops = sorted({free[i : i + n] for i in range(0, len(free) - 3, 5) for n in (1, 3)} - {""})
    requests = instances("generate_until", *((TEXT[0], {"until": [stop], "max_gen_toks": 24}) for stop in stops))
    assert engine_lm(loaded).generate_until(requests) == hflm.generate_until(requests)
    tokens = loaded[0].generate(torch.tensor([loaded[1].encode(TEXT[0])]), max_new_tokens=24, do_sample=False)[0].tolist()
    before = loaded[0].generation_config.eos_token_id
    loaded[0].generation_config.eos_token_id = [1, tokens[-10]]
    try:
        requests = instances("generate_until", (TEXT[0], {"until": [], "max_gen_toks": 24}))
        lm = engine_lm(loaded)
        ended = lm.generate_until(requests)
        assert ended == hflm.generate_until(requests) and ended[0] != free
        assert lm.calls[0].num_output < 24
    finally:
        loaded[0].generation_config.eos_token_id = before


def test_tasks_are_lm_evals(loaded, hflm, task_dir):
    if "nobos" in loaded[1].name_or_path:
        pytest.skip("once is enough")
    names = ["tiny_pick", "tiny_write", "tiny_stream"]
    results = []
    for lm in (engine_lm(loaded), hflm):
        manager = TaskManager(include_path=str(task_dir), include_defaults=False)
        results.append(simple_evaluate(model=lm, tasks=names, task_manager=manager, bootstrap_iters=100))
    for name in names:
        ours, theirs = (result["results"][name] for result in results)
        numbers = {key: value for key, value in theirs.items() if isinstance(value, float)}
        assert numbers and {key: ours[key] for key in numbers} == pytest.approx(numbers, rel=1e-4)
        ours, theirs = (result["samples"][name] for result in results)
        assert [one["doc_hash"] for one in ours] == [one["doc_hash"] for one in theirs]


def test_likelihood_goes_through_the_compressed_cache(loaded):
    """Also one-token answers: lm-eval's single forward pass would give every method the score of full."""
    ids, answers = loaded[1].encode(LONG)[:200], [[50], [60]]
    full, small = (engine_lm(loaded, method) for method in (Full(), Window(sparsity=0.9)))
    scores = [lm._score_continuations(ids, answers) for lm in (full, small)]
    assert min(abs(a[0] - b[0]) for a, b in zip(*scores, strict=True)) > 1e-3
    assert not small.calls[0].noop and len(small.calls) == 1, "one prefill for both"
    assert small.engine.ledger().resident_bytes <= 0.1 * full.engine.ledger().resident_bytes


def test_budget_refers_to_each_prompt(loaded):
    lm = engine_lm(loaded, Window(sparsity=0.5))
    for text in (LONG[:700], LONG[:200], LONG[:90]):
        lm.loglikelihood(instances("loglikelihood", (text, " yes")))
        prompt_len = lm.calls[-1].prompt_len
        assert lm.engine.spec.context_len == prompt_len == len(lm.tok_encode(text)) - 1
        assert lm.engine.method.planned.kept == prompt_len // 2
    lm.loglikelihood(instances("loglikelihood", ("x", "y")))
    assert lm.calls[-1].prompt_len <= 2 and lm.calls[-1].noop, "too short to drop anything: kept whole, and said so"


def example(name: str, cls: type[Method]) -> Method:
    fields = {field.name for field in dataclasses.fields(cls)}
    knobs = {"sparsity": 0.7} if issubclass(cls, Budgeted) else {}
    small = {"predict_layers": [1], "window": 4, "observe": 4, "pool": 3}
    return cls(**knobs, **{key: value for key, value in small.items() if key in fields})


@pytest.mark.parametrize("name", sorted(discover(methods, Method)))
def test_a_restored_cache_is_a_fresh_one(name, loaded):
    """Scoring after restore() is bit for bit scoring after a new prefill, also where slots were overwritten in between."""
    cls = discover(methods, Method)[name]
    prompt = torch.tensor([loaded[1].encode(LONG)[:60]])
    first, second = torch.arange(50, 90)[None], torch.arange(200, 230)[None]
    try:
        engine = Engine(loaded[0], example(name, cls), batch_size=1, max_prompt_len=60, max_new_tokens=40)
    except ValueError as err:
        pytest.skip(f"not for this shape: {err}")
    engine.prefill(prompt)
    expected = engine.score(second)
    engine.prefill(prompt)
    snapshot = engine.snapshot()
    moved = engine.score(first)
    engine.restore(snapshot)
    assert torch.equal(engine.score(second), expected)
    engine.restore(snapshot)
    assert torch.equal(engine.score(first), moved)


def test_rewind_alone_would_be_wrong_for_rings(loaded):
    """Why snapshot() exists."""
    engine = Engine(loaded[0], Window(sparsity=0.7), batch_size=1, max_prompt_len=60, max_new_tokens=40)
    engine.prefill(torch.tensor([loaded[1].encode(LONG)[:60]]))
    expected = engine.score(torch.arange(200, 230)[None])
    engine.rewind()
    assert not torch.equal(engine.score(torch.arange(200, 230)[None]), expected)


@pytest.mark.parametrize(
    ("gen_kwargs", "message"),
    [
        ({"do_sample": True, "temperature": 0.7}, "the task asks for sampling, the engine decodes greedily"),
        ({"num_beams": 4}, "the task sets num_beams for generation"),
        ({"max_gen_toks": 300}, "the task generates 300 tokens, the model allows 300 in all"),
        ({"max_gen_toks": 0}, "the task's max_gen_toks=0 must be at least 1"),
        ({"until": ["a", ""]}, "the task's until=.* must hold strings of at least one character"),
        ({"until": [3]}, "the task's until=.* must hold strings of at least one character"),
        ({"until": None}, "the task's until=.* must hold strings of at least one character"),
    ],
    ids=["sampling", "beams", "too-long", "no-tokens", "empty-stop", "number-stop", "no-stop"],
)
def test_what_greedy_decoding_cannot_do(loaded, gen_kwargs, message):
    with pytest.raises(ValueError, match=message):
        engine_lm(loaded).generate_until(instances("generate_until", (TEXT[0], gen_kwargs)))


def test_nothing_to_score_or_to_go_on_from_is_one_line(loaded):
    lm = engine_lm(loaded)
    for pair in ((TEXT[0], ""), ("", ""), ("", "<s>")):
        with pytest.raises(ValueError, match="^a continuation of 0 tokens cannot be scored"):
            lm.loglikelihood(instances("loglikelihood", pair))
    if loaded[1].encode(""):
        return
    for kind, request in (("loglikelihood", ("  ", "x")), ("generate_until", ("", {"until": [], "max_gen_toks": 3}))):
        with pytest.raises(ValueError, match="^a prompt of the task is empty and the tokenizer puts no token before it"):
            lm.answer(instances(kind, request))


def test_odd_texts_are_lm_evals(loaded, hflm):
    odd = "日本語 🙂 naïve\u2028\x85\0"
    requests = instances("loglikelihood", (odd, "🙂"), ("a", odd), (odd + " \n", "é"), ("</s>", "</s>"))
    ours, theirs = (lm.loglikelihood(requests) for lm in (engine_lm(loaded), hflm))
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-3)
    requests = instances("generate_until", *((odd * n, {"until": ["🙂", "er "], "max_gen_toks": 20}) for n in (1, 2, 9)))
    assert engine_lm(loaded).generate_until(requests) == hflm.generate_until(requests)
    requests = instances("loglikelihood_rolling", (odd,), ("",))
    ours, theirs = (lm.loglikelihood_rolling(requests) for lm in (engine_lm(loaded), hflm))
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_shapes_are_what_is_run(loaded):
    lm = engine_lm(loaded)
    for kind, arguments in (("loglikelihood", PAIRS[:3] + PAIRS[4:5]), ("generate_until", GENERATIONS[:3])):
        for request in instances(kind, *arguments):
            lm.calls.clear()
            lm.answer([request])
            ((prompt, num_new),) = lm.shapes([request])
            assert lm.calls[0].prompt_len == len(prompt) and lm.engine.spec.max_new_tokens <= max(num_new, 40)
    lm.calls.clear()
    request = instances("loglikelihood_rolling", (LONG,))
    lm.answer(request)
    assert [call.prompt_len for call in lm.calls] == [len(prompt) for prompt, _ in lm.shapes(request)]
    assert DOCS


def test_real_model_is_lm_evals(smollm2):
    """Values to 1e-3 and the same greedy text, on the default model."""
    prompt = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"
    pairs = [(prompt, " Madrid"), (prompt, " Lisbon, as everybody knows"), ("", "Once upon a time")]
    loaded = smollm2.model, smollm2.tokenizer
    ours, theirs = engine_lm(loaded, context_len=8), HFLM(pretrained=loaded[0], tokenizer=loaded[1], batch_size=1, device="cpu")
    requests = instances("loglikelihood", *pairs)
    found, expected = ours.loglikelihood(requests), theirs.loglikelihood(requests)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-3)
    requests = instances("generate_until", (prompt, {"until": ["."], "max_gen_toks": 12}))
    assert ours.generate_until(requests) == theirs.generate_until(requests)
    requests = instances("loglikelihood_rolling", (prompt,))
    assert ours.loglikelihood_rolling(requests) == pytest.approx(theirs.loglikelihood_rolling(requests), abs=1e-3)
