"""A random Llama with a trained byte-level BPE tokenizer in a folder, and small task files: all that lm-eval needs offline."""

import json
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = [
    "The lighthouse keeper wrote down the number 4711 in his book before the storm came.",
    "Question: what did the keeper write? Answer: the number 4711.",
    "A cache that forgets the middle of a text still remembers its end and its beginning.",
    "Numbers such as 17, 256 and 65536 are powers or primes, some of them both, some neither.",
]
DOCS = [
    {
        "text": " ".join(TEXT[i:] + TEXT[: i + 1]) + f" Note {i}:",
        "choices": [" yes", " no, it is not", " a b c"],
        "label": i % 3,
    }
    for i in range(4)
] + [{"text": "Short.", "choices": [" yes", " no", " maybe so"], "label": 1}]
TASKS = {
    "pick": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: choices
doc_to_target: label
num_fewshot: 1
metric_list:
  - {metric: acc}
  - {metric: acc_norm}
""",
    "write": """
output_type: generate_until
doc_to_text: "{{text}}\\nAnswer:"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["e", "\\n\\n"], max_gen_toks: 20}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
    "stream": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity}
  - {metric: bits_per_byte}
""",
}


def make_tokenizer(folder, bos: bool):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
        )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.save_pretrained(folder)


@pytest.fixture(scope="session", params=["bos", "nobos"])
def folder(request, tmp_path_factory, tiny_llama):
    """Folder with the model and a tokenizer that begins texts with BOS, or does not."""
    return make_folder(tmp_path_factory.mktemp(request.param), tiny_llama, request.param == "bos")


def make_folder(path, tiny_llama, bos: bool):
    # 300 positions: some of the prompts below must be cut
    model = tiny_llama(vocab_size=400, max_position_embeddings=300, bos_token_id=0, eos_token_id=1)
    model.generation_config.eos_token_id = [1, 77]
    model.save_pretrained(path)
    make_tokenizer(path, bos)
    return path


@pytest.fixture(scope="session")
def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def task_dir(tmp_path_factory):
    """Folder of task files <name>.yaml on one local jsonl."""
    path = tmp_path_factory.mktemp("tasks")
    data = path / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    for name, body in TASKS.items():
        head = f"task: tiny_{name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (path / f"{name}.yaml").write_text(head + body)
    return path
