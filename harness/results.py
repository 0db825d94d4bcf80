"""One cell gives one row: the columns of every table, file and dashboard are the fields below.

Units stand in the names. A value that is not known is `None` (JSON null), never NaN or infinity: the file stays valid JSON.
"""

import dataclasses
import json
import math
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

STATUSES = ("ok", "oom_prefill", "oom_decode", "invalid", "nan", "timeout", "failed")
STORE = Path("outputs/rows")  # finished rows by config hash, below the folder that run.py is started in
FLAGS = ("noop", "untrained", "baseline_broken", "short_decode", "simulated", "not_interleaved", "noisy", "few_prefills")


@dataclass
class Row:
    """Result of one cell: model x method x task x shape x sparsity x kv_dtype x seed."""

    status: str = "failed"
    flags: list[str] = field(default_factory=list)
    error: str | None = None

    model: str = ""
    method: str = ""
    knobs: dict = field(default_factory=dict)  # the method's resolved settings
    method_facts: dict = field(default_factory=dict)  # what the method says about this run: Method.facts()
    task: str = ""
    question: str = ""
    sparsity: float | None = None
    kv_budget: float | None = None
    kv_dtype: str = ""
    context_len: int = 0
    batch_size: int = 0
    num_new_tokens: int = 0
    seed: int = 0

    # bytes after prefill; kv_full_bytes is the dense cache in the model's own dtype
    kv_full_bytes: int | None = None
    kv_resident_bytes: int | None = None
    kv_predicted_bytes: int | None = None
    kv_kept_ratio: float | None = None
    kv_sparsity: float | None = None  # realised: 1 - resident / dense cache in the same kv_dtype
    kv_allocated_bytes: int | None = None  # resident + headroom for the tokens still to come
    kv_read_bytes_per_step: int | None = None
    memory_class: str = "none"
    kv_ledger: dict[str, int] = field(default_factory=dict)
    weights_bytes: int | None = None
    peak_load_bytes: int | None = None
    peak_prefill_bytes: int | None = None
    peak_decode_bytes: int | None = None

    ttft_ms: float | None = None
    compress_ms: float | None = None
    tpot_ms_p50: float | None = None
    tpot_ms_p95: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    num_prefills: int | None = None  # behind ttft_ms
    num_repeats: int | None = None  # timed decodes behind tpot_ms
    bound_ms_per_step: float | None = None
    bound_ratio: float | None = None
    achieved_gb_per_s: float | None = None
    ceiling_gb_per_s: float | None = None
    decode_impl: str | None = None
    step_impl: str | None = None
    kernel_impl: str | None = None

    accuracy: float | None = None
    accuracy_stderr: float | None = None
    num_samples: int | None = None
    output_len_mean: float | None = None
    perplexity: float | None = None
    top1_agreement: float | None = None
    kl_nats: float | None = None

    config_hash: str = ""
    code_hash: str = ""
    git_commit: str | None = None
    device_name: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    started_at: str = ""
    reproduce: str = ""

    def to_dict(self) -> dict:
        """Plain dict with NaN and infinities turned into None."""
        return _finite(dataclasses.asdict(self))

    def to_json(self) -> str:
        """One compact line of JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def read(cls, path: str | Path) -> "Row":
        """Row from a row.json; a file that is no row raises ValueError and names the file."""
        try:
            values = json.loads(Path(path).read_text())
            return cls(**values)
        except (json.JSONDecodeError, TypeError, UnicodeDecodeError) as err:
            raise ValueError(f"{path} is not a row of this version: {err}") from None


def _finite(value):
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_atomic(path: str | Path, text: str) -> None:
    """Write text so that a reader sees the old file or the whole new one, also after kill -9 or on a full disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
