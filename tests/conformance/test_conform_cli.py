"""python -m harness.conform: what it prints, its exit codes, and the mistakes that it puts into one line."""

import pytest

from harness import conform
from harness.conform import CHECKS, Fault, NotApplicable, main


def cheap(monkeypatch, *checks):
    monkeypatch.setattr(conform, "CHECKS", checks)


def sound(subject):
    return f"keeps {subject.kept}"


def faulty(subject):
    raise Fault("seen something")


def spared(subject):
    raise NotApplicable("no reason")


def crash(subject):
    raise RuntimeError("two\nlines")


def test_table_and_exit_code(monkeypatch, capsys):
    cheap(monkeypatch, sound, faulty, spared, crash)
    assert main(["method=window", "sparsity=0.5", "kv_dtype=fp16"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("window, kv_dtype fp16, keeps 46 of 92 tokens; random Llama of 3 layers")
    assert [line.split() for line in lines[1:4]] == [
        ["sound", "pass", "keeps", "46"],
        ["faulty", "fail", "seen", "something"],
        ["spared", "not", "applicable", "no", "reason"],
    ]
    assert (
        lines[4].startswith("crash") and lines[4].endswith(": two lines") and "RuntimeError at test_conform_cli.py:" in lines[4]
    )
    assert lines[5] == "1 pass, 2 fail, 1 not applicable"


def test_passing_is_exit_code_0(monkeypatch, capsys):
    cheap(monkeypatch, sound, spared)
    assert main(["method=full"]) == 0


def test_default_knobs_find_a_model_that_is_deep_enough(monkeypatch, capsys):
    cheap(monkeypatch, sound)
    assert main(["method=sparda"]) == 0
    assert "random Llama of 16 layers" in capsys.readouterr().out


def test_all_methods(monkeypatch, capsys):
    names = conform.method_names()
    assert {"full", "window", "sparda"} <= set(names) and "full_schema" not in names
    monkeypatch.setattr(conform, "method_names", lambda: ["full", "window"])
    cheap(monkeypatch, sound)
    assert main(["method=all", "sparsity=0.9999"]) == 0
    out, err = capsys.readouterr()
    assert [line.partition(":")[0] for line in out.splitlines() if line.startswith(("full", "window"))] == [
        "full, kv_dtype fp32, keeps 92 of 92 tokens; random Llama of 3 layers in fp32 on cpu, kernels reference",
        "window",
    ]
    assert "window: not applicable: sparsity=0.9999 leaves 0 slots" in out
    assert err == "warning: method=full ignores sparsity\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (["method=windw"], "unknown method 'windw': did you mean window?"),
        (["sparsity=0.8"], "give a method, as in method=window, or method=all"),
        (["method=window", "sparcity=1"], "unknown key 'sparcity': did you mean sparsity"),
        (["method=window", "task=speed"], "task=speed: the checks use tiny models of their own and take only method, sparsity"),
        (["method=window", "-m"], "unknown option -m"),
        (["method=window", "sparsity=0.9999"], "leaves 0 slots"),
        (["method=window,full"], "several values"),
        (["method=int8", "kv_dtype=fp16"], "ignores kv_dtype"),
    ),
    ids=("method", "missing", "key", "foreign", "flag", "budget", "sweep", "ignored"),
)
def test_mistakes_are_one_line(monkeypatch, capsys, arguments, message):
    cheap(monkeypatch, sound)
    code = main(arguments)
    error = capsys.readouterr().err.splitlines()
    assert message in error[0] and len(error) == 1
    assert code == (0 if "ignores" in message else 2)


def test_every_check_says_what_it_protects_from():
    for function in CHECKS:
        assert function.__doc__ and "\n" not in function.__doc__.strip(), function.__name__
