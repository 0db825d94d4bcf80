"""Prompts through a chat template are what the tokenizer's own apply_chat_template makes of the same messages."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from harness.models import ByteTokenizer
from tasks.base import FREE
from tasks.chat import chat_of
from tasks.kv_retrieval import KvRetrieval
from tasks.multi_turn import MultiTurn
from tasks.niah import Niah

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>", "<think>", "</think>"]
LOOP = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
BEGIN_ANSWER = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
TEMPLATES = {
    "bos-in-template": "{{ bos_token }}" + LOOP + BEGIN_ANSWER,
    "no-bos": LOOP + BEGIN_ANSWER,
    "system-by-default": "{{ bos_token }}Be brief.<|end|>\n" + LOOP + BEGIN_ANSWER,
    # as Qwen3: past answers and the next one carry an empty thought when thinking is off
    "thinks-by-default": LOOP
    + "{% if add_generation_prompt %}<|assistant|>\n{% if enable_thinking is defined and not enable_thinking %}"
    + "<think></think>\n{% endif %}{% endif %}",
}


def byte_level(template: str | None, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with special tokens and no merges."""
    vocab = {token: i for i, token in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", additional_special_tokens=SPECIAL[2:]
    )
    fast.chat_template = template
    return fast


def whole(sample):
    return sample.prompt_ids + sample.forced_ids


@pytest.mark.parametrize("adds_bos", [True, False], ids=["adds-bos", "adds-none"])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("make", [Niah, lambda **knobs: KvRetrieval(**knobs)], ids=["niah", "kv"])
def test_the_prompt_is_what_the_template_makes(template, adds_bos, make):
    tokenizer = byte_level(TEMPLATES[template], adds_bos)
    for question in ("visible", "hidden"):
        for sample in make(question=question, num_samples=3).samples(tokenizer, 1203, 0):
            ids = whole(sample)
            text = tokenizer.decode(ids)
            assert len(ids) == 1203 and sample.meta["first_ids"] == ids[:8]
            # the template's own BOS is the only one; where it has none, the tokenizer's
            wanted_bos = int("bos_token" in TEMPLATES[template] or adds_bos)
            assert ids.count(0) == wanted_bos == ids[:1].count(0)
            begin = text.index("<|user|>\n") + len("<|user|>\n")
            content, _, prefix = text[begin:].partition("<|end|>\n<|assistant|>\n")
            options = {"add_generation_prompt": True, "enable_thinking": False, "tokenize": False}
            expected = tokenizer.apply_chat_template([{"role": "user", "content": content}], **options)
            expected = "<s>" * (wanted_bos - expected.startswith("<s>")) + expected
            assert text.startswith(expected)
            assert prefix.strip()
            if question == "hidden":
                assert "What is the" in tokenizer.decode(sample.forced_ids)
                assert "<|assistant|>" not in tokenizer.decode(sample.prompt_ids)


def test_a_later_turn_goes_on_in_the_conversation():
    tokenizer = byte_level(TEMPLATES["bos-in-template"].replace("m.content", "m.content | trim"))
    for sample in MultiTurn(num_turns=3, num_samples=2).samples(tokenizer, 1503, 0):
        script, _ = sample.script()
        said = tokenizer.encode("X", add_special_tokens=False)
        ids = sample.prompt_ids + [said[0] if token == FREE else token for token in script]
        text = tokenizer.decode(ids)
        assert ids.count(0) == 1
        turns = [part.partition("<|end|>\n<|assistant|>\n") for part in text.split("<|user|>\n")[1:]]
        messages = []
        for user, _, answer in turns:
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer.removesuffix("<|end|>\n")}]
        assert len(turns) == 3 and "X" * 12 in messages[1]["content"]
        expected = tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("<|end|>\n")
        # trimmed again: only white space at the ends of messages may differ
        assert "".join(text.split()) == "".join(expected.split())


def test_none_and_no_template_are_plain_text():
    with_template, without = byte_level(TEMPLATES["no-bos"]), byte_level(None)
    for tokenizer, knobs in ((with_template, {"chat_template": "none"}), (without, {}), (ByteTokenizer(), {})):
        for sample in Niah(num_samples=2, **knobs).samples(tokenizer, 900, 0):
            ids = whole(sample)
            assert ids.count(tokenizer.bos_token_id) == 1 == ids[:1].count(tokenizer.bos_token_id)
            assert "<|user|>" not in tokenizer.decode(ids)


def test_the_default_model_is_prompted_in_plain_text(smollm2):
    assert chat_of(smollm2.tokenizer, "auto").to_answer == []


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('system message needed') }}", "{% for m in messages %}{{ m.content | upper }}{% endfor %}"],
    ids=["refuses", "alters"],
)
def test_a_template_that_alters_messages_is_refused(template):
    with pytest.raises(ValueError, match=r"^task.chat_template=auto: .*; use task.chat_template=none") as caught:
        Niah().samples(byte_level(template), 900, 0)
    assert "\n" not in str(caught.value)
