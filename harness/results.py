"""One cell gives one row: the columns of every table, file and dashboard are the fields below.

Units stand in the names. A value that is not known is `None` (JSON null), never NaN or infinity: the file stays valid JSON.

    python -m harness.results ls|show|export [folder]      rows of any folder, see harness/report/listing.py
"""

import dataclasses
import json
import math
import os
import secrets
import sys
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path

STATUSES = ("ok", "oom_prefill", "oom_decode", "invalid", "nan", "timeout", "failed")
FLAGS = (
    "noop",
    "untrained",
    "baseline_broken",
    "short_decode",
    "simulated",
    "not_interleaved",
    "noisy",
    "few_prefills",
    "slow_kernels",
    "foreign_calibration",
    "partly_noop",
    "double_bos",
    "truncated",
    "shared_device",
    "pruned",
)
# without these a JSON object is no row; all else has a default, so that rows of older versions load
REQUIRED = ("status", "model", "method", "task", "config_hash")


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
    tp_size: int = 1  # ranks of tensor parallelism; bytes are those of one rank
    prefill_chunk: int | None = None  # None: the whole prompt at once
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
    accuracy_by: dict[str, float] = field(default_factory=dict)  # mean score by turn, depth, kind or instruction
    metric: str = ""  # what accuracy is, where the task has several
    num_samples: int | None = None
    num_resumed: int | None = None  # of them from the log of an earlier run of this cell; times are this run's
    num_noop: int | None = None  # of them with a prompt that the budget covers whole, in tasks with prompts of many lengths
    output_len_mean: float | None = None
    # against full on the same samples, in units of accuracy: mean difference and the 95 % interval of a paired bootstrap
    accuracy_diff: float | None = None
    accuracy_diff_low: float | None = None
    accuracy_diff_high: float | None = None
    num_pairs: int | None = None
    verdict: str | None = None  # better, worse, same (the interval holds 0), unclear (it does not, but under 6 differ)
    worst_task: str | None = None  # of a group of tasks, the one that loses most against full
    worst_task_diff: float | None = None
    output_len_diff: float | None = None  # tokens
    perplexity: float | None = None
    top1_agreement: float | None = None
    kl_nats: float | None = None
    acceptance_rate: float | None = None  # share of full's own greedy tokens that the method would have drafted

    config_hash: str = ""
    code_hash: str = ""
    git_commit: str | None = None
    device_name: str = ""
    shared_with: str | None = None  # who else used the device
    duration_s: float | None = None  # of the whole process, from its start to this row
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
            return cls.from_dict(json.loads(Path(path).read_text("utf-8")), str(path))
        except (json.JSONDecodeError, UnicodeDecodeError) as err:
            raise ValueError(f"{path} is not a row: {err}") from None

    @classmethod
    def from_dict(cls, values: dict, source: str) -> "Row":
        """Row of any version: a missing field gets its default, one that is unknown here is named on stderr and left out."""
        missing = [name for name in REQUIRED if not isinstance(values, dict) or values.get(name) is None]
        if missing:
            raise ValueError(f"{source} is not a row: it has no {', '.join(missing)}")
        try:
            row = cls.known(values)
        except ValueError as err:
            raise ValueError(f"{source} is not a row: {err}") from None
        if unknown := sorted(values.keys() - {item.name for item in dataclasses.fields(cls)}):
            print(f"note: {source} is of another version, left out: {', '.join(unknown)}", file=sys.stderr)
        return row

    @classmethod
    def known(cls, values: dict) -> "Row":
        """Row from those values whose names are known here; null where a field takes none is its default, NaN is null.

        Raises ValueError naming a value of a wrong type, also inside a list or dict: no table or chart has to expect one.
        """
        hints, found = typing.get_type_hints(cls), {}
        for name, value in _finite(values).items():
            if name not in hints or value is None and not _fits(None, hints[name]):
                continue
            if not _fits(value, hints[name]):
                raise ValueError(f"{name}={str(value)[:60]!r} is no value of a row")
            if isinstance(value, dict) and typing.get_args(hints[name]):
                value = {key: item for key, item in value.items() if item is not None}
            found[name] = value
        return cls(**found)


def _fits(value, hint) -> bool:
    """Whether a value read from JSON is of the type that a field is declared with; null fits as an item of a dict."""
    if isinstance(hint, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(hint))
    outer, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if isinstance(value, bool) or not isinstance(value, (int, float) if outer is float else outer):
        return False
    if outer is dict and inner:
        return all(item is None or _fits(item, inner[1]) for item in value.values())
    return outer is not list or not inner or all(_fits(item, inner[0]) for item in value)


def _finite(value):
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_atomic(path: str | Path, text: str) -> None:
    """Write text so that a reader sees the old file or the whole new one, also after kill -9 or on a full disk.

    The file has the mode of any new file; through a link its target is replaced, and a device is written to as it is.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_text(text, "utf-8", "backslashreplace")
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        # an error's text may hold what is no UTF-8
        with open(temporary, "x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    from harness.report.listing import main

    sys.exit(main(sys.argv[1:]))
