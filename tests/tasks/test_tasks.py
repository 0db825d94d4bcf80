"""What holds for every task: exact lengths, the same samples in every process, other samples for another seed."""

import json
import os
import subprocess
import sys

import pytest

from harness.models import ByteTokenizer
from tasks.base import leading_ids
from tasks.code_lookup import CodeLookup
from tasks.common_words import CommonWords
from tasks.corpus import corpus_of, pieces
from tasks.doc_qa import DocQa
from tasks.kv_retrieval import KvRetrieval
from tasks.multi_instruction import MultiInstruction
from tasks.multi_turn import MultiTurn
from tasks.niah import Niah
from tasks.niah_multikey import NiahMultikey
from tasks.niah_multiquery import NiahMultiquery
from tasks.niah_multivalue import NiahMultivalue
from tasks.passkey import Passkey
from tasks.perplexity import Perplexity
from tasks.speed import Speed
from tasks.variable_tracking import VariableTracking

TASKS = {
    "niah": Niah(),
    "niah-hidden": Niah(question="hidden"),
    "niah-odd": Niah(num_samples=3, num_facts=2),
    "niah-facts": Niah(haystack="facts"),
    "niah-facts-hidden": Niah(haystack="facts", question="hidden"),
    "niah-two-turn": Niah(question="two_turn"),
    "niah_multikey": NiahMultikey(haystack="facts"),
    "niah_multivalue": NiahMultivalue(num_values=2),
    "niah_multiquery-hidden": NiahMultiquery(num_queries=2, question="hidden"),
    "multi_turn": MultiTurn(num_turns=2),
    "multi_turn-hidden": MultiTurn(num_turns=3, num_facts=3, question="hidden"),
    "passkey": Passkey(),
    "passkey-two-turn": Passkey(question="two_turn"),
    "kv_retrieval-hidden": KvRetrieval(question="hidden"),
    "code_lookup-two-turn": CodeLookup(question="two_turn", num_samples=3),
    "doc_qa-hidden": DocQa(question="hidden"),
    "multi_instruction": MultiInstruction(),
    "variable_tracking-two-turn": VariableTracking(question="two_turn"),
    "common_words-hidden": CommonWords(question="hidden"),
    "perplexity": Perplexity(num_scored=37),
    "speed": Speed(),
}
FORCED_BEYOND_CONTEXT = {"perplexity": 37}
CONTEXT_LENS = (677, 1000, 1024, 2049)
BYTES = ByteTokenizer()
every_task = pytest.mark.parametrize("name", TASKS)


class NoBos(ByteTokenizer):
    """Bytes without a BOS of its own, as SmolLM2 has it."""

    def encode(self, text, add_special_tokens=False):
        return super().encode(text)


def check_lengths(name, tokenizer, context_len):
    samples = TASKS[name].samples(tokenizer, context_len, seed=0)
    assert len({sample.id for sample in samples}) == len(samples) == TASKS[name].num_samples
    assert len({sample.meta["prompt_sha"] for sample in samples}) == len(samples)
    for sample in samples:
        ids = sample.prompt_ids + sample.forced_ids
        assert len(ids) == context_len + FORCED_BEYOND_CONTEXT.get(name, 0)
        assert all(isinstance(token, int) for token in ids)
        assert sample.meta["first_ids"] == ids[:8]
        assert json.dumps(sample.meta)
        assert bool(sample.forced_ids) == ("hidden" in name or name == "perplexity")
        if name != "speed":
            assert (
                ids.count(tokenizer.bos_token_id)
                == len(leading_ids(tokenizer))
                == ids[: len(leading_ids(tokenizer))].count(tokenizer.bos_token_id)
            )


@every_task
@pytest.mark.parametrize("context_len", CONTEXT_LENS)
@pytest.mark.parametrize("tokenizer", [BYTES, NoBos()], ids=["bos", "nobos"])
def test_lengths_are_exact_in_bytes(name, tokenizer, context_len):
    check_lengths(name, tokenizer, context_len)


@every_task
@pytest.mark.parametrize("context_len", CONTEXT_LENS)
def test_lengths_are_exact_in_real_tokens(name, context_len, smollm2):
    check_lengths(name, smollm2.tokenizer, context_len)


def test_lead_is_what_the_tokenizer_sets_itself(smollm2):
    assert leading_ids(BYTES) == [BYTES.bos_token_id]
    assert leading_ids(NoBos()) == []
    assert leading_ids(smollm2.tokenizer) == []


@every_task
def test_another_seed_gives_other_samples(name):
    shas = [{s.meta["prompt_sha"] for s in TASKS[name].samples(BYTES, 900, seed)} for seed in (0, 1)]
    assert not shas[0] & shas[1]


def test_samples_are_the_same_in_every_process():
    code = (
        "from tests.tasks.test_tasks import *; "
        "print(json.dumps({n: [s.meta['prompt_sha'] for s in t.samples(BYTES, 777, 3)] for n, t in TASKS.items()}))"
    )
    here = {name: [s.meta["prompt_sha"] for s in task.samples(BYTES, 777, 3)] for name, task in TASKS.items()}
    for hash_seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.getcwd()}
        there = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert json.loads(there.stdout) == here


def test_what_was_drawn_before_does_not_matter():
    first = Niah().samples(ByteTokenizer(), 1000, 0)
    tokenizer = ByteTokenizer()
    Perplexity().samples(tokenizer, 1000, 5)
    assert Niah().samples(tokenizer, 1000, 0) == first


def test_corpus_is_cut_without_loss_and_plain_ascii(smollm2):
    assert all(piece.isascii() for piece in pieces())
    assert sum(map(len, pieces())) > 3_000_000
    corpus = corpus_of(smollm2.tokenizer)
    ids = corpus.running_ids(10_000, start=corpus.num_pieces - 2)
    assert len(ids) == 10_000
    assert (pieces()[-2] + pieces()[-1] + pieces()[0]).startswith(smollm2.tokenizer.decode(ids)[:4000])


def test_pieces_are_tokenised_once():
    calls = []

    class Counting(ByteTokenizer):
        def encode(self, text, add_special_tokens=False):
            calls.append(text)
            return super().encode(text, add_special_tokens)

    tokenizer = Counting()
    Perplexity().samples(tokenizer, 20_000, 0)
    calls.clear()
    Perplexity().samples(tokenizer, 20_000, 0)
    assert calls == [""]


@pytest.mark.parametrize("task", [Niah(), Niah(haystack="facts"), Perplexity()], ids=["niah", "facts", "perplexity"])
def test_128k_tokens_are_there(task):
    assert all(len(sample.prompt_ids) == 131072 for sample in task.samples(BYTES, 131072, 0))


@pytest.mark.parametrize(
    ("task", "cause"),
    [
        (Niah(num_samples=2), "haystack=text"),
        (Niah(num_samples=2, haystack="facts"), "haystack=facts"),
        (Perplexity(num_samples=3), "the text for 3 samples"),
    ],
    ids=["niah", "facts", "perplexity"],
)
def test_too_long_names_the_longest(task, cause, monkeypatch):
    # a small corpus, and a tokenizer that has not seen the large one
    few, tokenizer = pieces()[:60], ByteTokenizer()
    monkeypatch.setattr("tasks.corpus.pieces", lambda: few)
    with pytest.raises(ValueError, match=rf"^context_len=9000000 is too long: {cause} can fill at most \d+$") as caught:
        task.samples(tokenizer, 9_000_000, 0)
    longest = int(str(caught.value).split()[-1])
    assert min(len(sample.prompt_ids) for sample in task.samples(tokenizer, longest, 0)) == longest
    with pytest.raises(ValueError, match=f"can fill at most {longest}$"):
        task.samples(tokenizer, longest + 1, 0)


def test_perplexity_goes_on_where_the_prompt_ends_and_never_overlaps(smollm2):
    for tokenizer, context_len in ((BYTES, 50_000), (smollm2.tokenizer, 3001)):
        corpus = corpus_of(tokenizer)
        seen = set()
        for sample in Perplexity(num_samples=5, num_scored=64).samples(tokenizer, context_len, 0):
            ids = (sample.prompt_ids + sample.forced_ids)[len(leading_ids(tokenizer)) :]
            assert (len(sample.prompt_ids), len(sample.forced_ids)) == (context_len, 64)
            index, used = sample.meta["first_piece"], []
            while sum(len(corpus.piece_ids(i)) for i in used) < len(ids):
                used.append((index + len(used)) % corpus.num_pieces)
            assert ids == sum((corpus.piece_ids(i) for i in used), [])[: len(ids)]
            assert not seen & set(used)
            seen |= set(used)


def test_speed_draws_no_special_ids(smollm2):
    class Special(ByteTokenizer):
        all_special_ids = [0, 9]
        added_tokens_decoder = {5: "<x>"}

    drawn = {i for sample in Speed(num_samples=3).samples(Special(), 5000, 0) for i in sample.prompt_ids}
    assert drawn == set(range(256)) - {0, 5, 9}
    real = smollm2.tokenizer
    drawn = {i for sample in Speed(num_samples=2).samples(real, 100_000, 0) for i in sample.prompt_ids}
    assert len(drawn) > 0.9 * real.vocab_size
    assert max(drawn) < smollm2.model.config.vocab_size
    assert not drawn & {real.bos_token_id, real.eos_token_id}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Perplexity(num_samples=0), "task.num_samples=0: must be at least 1"),
        (lambda: Perplexity(num_scored=-1), "task.num_scored=-1: must be at least 1"),
        (lambda: Speed(num_samples=0), "task.num_samples=0: must be at least 1"),
        (lambda: Perplexity().samples(BYTES, 0, 0), "context_len=0: must be at least 1"),
        (lambda: Speed().samples(BYTES, 0, 0), "context_len=0: must be at least 1"),
    ],
    ids=["perplexity-samples", "perplexity-scored", "speed-samples", "perplexity-len", "speed-len"],
)
def test_bad_values(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == message
