"""A W&B workspace and a report over all cells of a project: Pareto fronts, memory ledger, times, comparison of runs.

python -m harness.dashboard --project kvgauge              saved in W&B when logged in, else written to wandb-dashboard.json
python -m harness.dashboard --offline --out spec.json      only the file
Needs the extra `report` (wandb-workspaces). Never asks for a login.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import wandb

try:
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws
except ModuleNotFoundError:
    sys.exit("error: the dashboard needs wandb-workspaces: pip install -c constraints.txt -e '.[report]'")

from harness.results import write_atomic

METHOD = "method.name"  # of the run's config
LEDGER_KINDS = ("kv", "scales", "index", "headroom")
PARALLEL = (
    # metric or config key, shown as, smaller values on top, log scale
    (wr.Config(METHOD), "method", None, None),
    (wr.SummaryMetric("context_len"), "context", None, True),
    (wr.SummaryMetric("batch_size"), "batch", None, True),
    (wr.SummaryMetric("kv_kept_ratio"), "KV kept", True, None),
    (wr.SummaryMetric("ttft_ms"), "TTFT, ms", True, True),
    (wr.SummaryMetric("tpot_ms_p50"), "TPOT, ms", True, True),
    (wr.SummaryMetric("decode_tokens_per_s"), "tokens/s", None, True),
    (wr.SummaryMetric("accuracy"), "accuracy", None, None),
)


def panels() -> dict[str, list]:
    """Panels by section; fresh objects, since a grid takes them over."""

    def scatter(title: str, x: str, y: str, **options):
        legend = "${config:method.name} ${summary:sparsity} ${summary:kv_dtype}"
        return wr.ScatterPlot(title=title, x=wr.SummaryMetric(x), y=wr.SummaryMetric(y), legend_template=legend, **options)

    def bars(title: str, *metrics: str, unit: str):
        chosen = [wr.SummaryMetric(metric) for metric in metrics]
        return wr.BarPlot(title=title, metrics=chosen, title_x=unit, groupby=wr.Config(METHOD), groupby_aggfunc="median")

    columns = [
        wr.ParallelCoordinatesPlotColumn(metric=metric, display_name=name, inverted=inverted, log=log)
        for metric, name, inverted, log in PARALLEL
    ]
    return {
        "Pareto: accuracy against cost": [
            scatter("accuracy against KV bytes kept", "kv_kept_ratio", "accuracy", running_ymax=True),
            scatter("accuracy against tokens/s", "decode_tokens_per_s", "accuracy"),
            scatter("accuracy against time to first token, ms", "ttft_ms", "accuracy", log_x=True),
        ],
        "Memory": [
            bars("KV ledger by kind", *(f"kv_ledger.{kind}" for kind in LEDGER_KINDS), unit="bytes"),
            bars("peaks", "peak_prefill_bytes", "peak_decode_bytes", unit="bytes"),
            scatter("measured against predicted KV bytes", "kv_predicted_bytes", "kv_resident_bytes", log_x=True, log_y=True),
        ],
        "Time": [
            bars("time per token, median and its bandwidth bound", "tpot_ms_p50", "bound_ms_per_step", unit="ms"),
            scatter("time per token against KV bytes read", "kv_read_bytes_per_step", "tpot_ms_p50"),
            scatter("time per token against context", "context_len", "tpot_ms_p50", log_x=True),
        ],
        "Runs": [
            wr.ParallelCoordinatesPlot(title="all cells", columns=columns),
            wr.RunComparer(diff_only=True),
            wr.LinePlot(title="accuracy as samples come in", x="sample/index", y=["sample/mean_score"]),
        ],
    }


def workspace(entity: str, project: str) -> ws.Workspace:
    """Every finished cell of the project, grouped by method."""
    sections = [ws.Section(name=name, panels=found, is_open=True) for name, found in panels().items()]
    runs = ws.RunsetSettings(groupby=[ws.Config(METHOD)], filters=ws.And(ws.Summary("status") == "ok"))
    return ws.Workspace(entity=entity, project=project, name="KVGauge", sections=sections, runset_settings=runs)


def report(entity: str, project: str) -> wr.Report:
    """The same panels as a document, with how to read them."""
    texts = {
        "Pareto: accuracy against cost": "Upper left is better, for tokens/s upper right. Filter to one model and context.",
        "Memory": "Bytes held after prefill; peak and resident are different numbers.",
        "Time": "A time per token far above its bound is launches and small work, not bytes.",
        "Runs": "The run comparer shows what differs between two cells.",
    }
    blocks = [
        wr.H1("What do these KV-cache methods cost and save?"),
        wr.P("One run is one cell; full is the reference of every cell."),
    ]
    for name, found in panels().items():
        runs = wr.Runset(entity=entity, project=project, name="finished cells", filters="SummaryMetric('status') == 'ok'")
        blocks += [wr.H2(name), wr.P(texts[name]), wr.PanelGrid(runsets=[runs], panels=found)]
    return wr.Report(
        entity=entity, project=project, title="KVGauge", description="Written by python -m harness.dashboard", blocks=blocks
    )


def spec(project: str) -> dict:
    """Both as plain JSON values. Without an entity nothing is looked up in W&B, so this works offline."""
    document = report("", project)
    return {
        "workspace": _values(workspace("", project)),
        "report": {"title": document.title, "project": project, "blocks": [_values(block) for block in document.blocks]},
    }


def _values(node) -> dict:
    return node._to_model().model_dump(by_alias=True, exclude_none=True, mode="json")


def logged_in() -> bool:
    """Whether W&B may be asked: a key is stored and nothing says offline. Never prompts."""
    return os.environ.get("WANDB_MODE", "online") not in ("offline", "disabled", "dryrun") and bool(wandb.login(prompt=False))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.dashboard", description="W&B workspace and report over all cells.")
    parser.add_argument("--project", default="kvgauge", help="default: %(default)s")
    parser.add_argument("--entity", help="user or team; default: that of the login")
    parser.add_argument("--offline", action="store_true", help="write the file even when logged in")
    parser.add_argument(
        "--out", type=Path, default=Path("wandb-dashboard.json"), help="where the file goes; default: %(default)s"
    )
    args = parser.parse_args(argv)
    try:
        if not args.offline and logged_in():
            entity = args.entity or wandb.Api(timeout=30).default_entity
            for made in (workspace(entity, args.project), report(entity, args.project)):
                made.save()
                print(made.url)
            return 0
    # no server, no rights, no such team: the file is the way out, whatever W&B raises
    except Exception as err:
        print(f"warning: not saved in W&B: {' '.join(str(err).split())[:300]}", file=sys.stderr)
    try:
        write_atomic(args.out, json.dumps(spec(args.project), indent=1))
    except OSError as err:
        print(f"error: {args.out} cannot be written: {err}", file=sys.stderr)
        return 1
    print(f"{args.out}: workspace and report as JSON; run `wandb login`, then this again, to save them in W&B")
    return 0


if __name__ == "__main__":
    sys.exit(main())
