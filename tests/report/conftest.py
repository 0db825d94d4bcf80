"""Made-up rows, many and awkward: never shown to anyone, only to see that the page, the advice and the comparison hold."""

import dataclasses
import hashlib
import json
import math

import pytest

from harness.results import Row

METHODS = ("window", "streaming_llm", "sparda", "int8", "h2o", "snapkv", "tova", "quest", "kivi", "duo", "pyramid", "expected")
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


def make_row(method: str = "full", sparsity: float | None = None, **fields) -> Row:
    """A row of an 8B shape whose bytes and times hang together: time = bytes over copy speed, plus 0.5 ms."""
    context_len, batch_size = fields.get("context_len", 16384), fields.get("batch_size", 1)
    full_bytes = 131072 * context_len * batch_size
    kept = 1.0 if sparsity is None else 1 - sparsity
    resident = int(full_bytes * kept)
    weights, ceiling = 15_000_000_000, 4000.0
    bound = (weights + resident) / (ceiling * 1e6)
    tpot = bound + 0.5
    budget = f" sparsity={sparsity:g}" if sparsity is not None else ""
    values = {
        "status": "ok",
        "model": "llama3-8b-shape",
        "method": method,
        "task": "niah",
        "question": "visible",
        "sparsity": sparsity,
        "kv_dtype": "bf16",
        "context_len": context_len,
        "batch_size": batch_size,
        "num_new_tokens": 128,
        "kv_full_bytes": full_bytes,
        "kv_resident_bytes": resident,
        "kv_predicted_bytes": resident,
        "kv_kept_ratio": kept,
        "kv_allocated_bytes": resident + 2**20,
        "kv_read_bytes_per_step": resident,
        "memory_class": "none" if method == "full" else "freed",
        "kv_ledger": {"kv": resident - resident // 50, "index": resident // 50, "headroom": 2**20},
        "weights_bytes": weights,
        "peak_prefill_bytes": weights + full_bytes * 2,
        "peak_decode_bytes": weights + resident,
        "ttft_ms": context_len / 20,
        "tpot_ms_p50": tpot,
        "tpot_ms_p95": tpot * 1.05,
        "decode_tokens_per_s": batch_size * 1000 / tpot,
        "bound_ms_per_step": bound,
        "bound_ratio": tpot / bound,
        "achieved_gb_per_s": ceiling * bound / tpot,
        "ceiling_gb_per_s": ceiling,
        "decode_impl": "graph",
        "kernel_impl": "triton",
        "accuracy": 0.98,
        "accuracy_stderr": 0.004,
        "num_samples": 400,
        "device_name": "NVIDIA H200",
        "versions": {"python": "3.12.3", "torch": "2.11.0", "cuda": "13.0"},
        "code_hash": "aaaaaaaaaaaa",
        "started_at": "2026-12-01T03:00:00+00:00",
        "reproduce": f"python run.py method={method}{budget} shape.context_len={context_len} shape.batch_size={batch_size}",
    }
    row = dataclasses.replace(Row(), **(values | fields))
    if not row.config_hash:
        key = (
            row.method,
            row.sparsity,
            row.kv_dtype,
            row.model,
            row.task,
            row.question,
            row.context_len,
            row.batch_size,
            row.seed,
        )
        row.config_hash = hashlib.sha256(repr(key).encode()).hexdigest()[:12]
    return row


def stress_rows() -> list[Row]:
    """Over 200 rows: 12 methods, 3 sparsities, 3 contexts, 2 tasks, two questions, every status and flag, a hostile name."""
    rows = []
    for context_len in (2048, 16384, 65536):
        for task, question in (("niah", "visible"), ("niah", "hidden"), ("ruler_vt", "visible")):
            rows.append(make_row(context_len=context_len, task=task, question=question))
            for place, method in enumerate(METHODS):
                for sparsity in (0.5, 0.8, 0.95) if context_len == 16384 else (0.8,):
                    lost = sparsity**3 * (0.02 + 0.08 * place) * (1.5 if question == "hidden" else 1)
                    row = make_row(method, sparsity, context_len=context_len, task=task, question=question)
                    row.accuracy = max(0.0, row.accuracy - lost)
                    row.accuracy_stderr = math.sqrt(row.accuracy * (1 - row.accuracy) / 400)
                    row.ttft_ms *= 1 + 0.02 * place
                    row.tpot_ms_p50 *= 1 + 0.03 * place
                    row.decode_tokens_per_s /= 1 + 0.03 * place
                    row.flags = (
                        [["noop"], ["untrained"], ["simulated"], ["noisy", "not_interleaved"]][place % 4] if place > 7 else []
                    )
                    rows.append(row)
    for status in ("invalid", "oom_prefill", "oom_decode", "nan", "timeout", "failed"):
        rows.append(
            Row(
                status=status,
                model="llama3-8b-shape",
                method="h2o",
                task="niah",
                context_len=131072,
                batch_size=1,
                error="no room " * 20,
            )
        )
    rows.append(
        make_row(
            "sparda", 0.8, model=HOSTILE, config_hash="f" * 12, reproduce=f"python run.py model.path='{HOSTILE}' method=sparda"
        )
    )
    return rows


def write_rows(folder, rows: list[Row], samples: dict[str, list[dict]] | None = None):
    """Rows as a store: <hash>.json, and <hash>.samples.jsonl where given."""
    folder.mkdir(parents=True, exist_ok=True)
    for place, row in enumerate(rows):
        stem = row.config_hash or f"row{place}"
        (folder / f"{stem}.json").write_text(row.to_json())
        if samples and row.config_hash in samples:
            (folder / f"{stem}.samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples[row.config_hash]))
    return folder


@pytest.fixture(scope="session")
def stress_folder(tmp_path_factory):
    folder = write_rows(tmp_path_factory.mktemp("stress"), stress_rows())
    layers = range(30)
    matrix = [[1 / (1 + abs(one - other)) for other in layers] for one in layers]
    (folder / "calibration.json").write_text(json.dumps({"model": "x", "iou": matrix, "recall": {"4096": matrix}}))
    return folder
