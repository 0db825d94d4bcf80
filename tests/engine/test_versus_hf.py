"""The comparison with plain transformers runs, and shows no time for two models that do not agree."""

import json

from harness import versus_hf

ARGV = ["model=dummy", "model.device=cpu", "shape=smoke", "shape.num_new_tokens=3", "shape.batch_size=2"]


def test_both_agree(capsys):
    assert versus_hf.main(ARGV) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["logits_difference"] < 1e-4
    assert result["tpot_ms_ratio"] == result["tpot_ms_transformers"] / result["tpot_ms_kvgauge"] > 0


def test_no_times_for_different_logits(capsys, monkeypatch):
    plain = versus_hf.Plain._forward
    monkeypatch.setattr(versus_hf.Plain, "_forward", lambda self, ids: plain(self, ids) * 1.2)
    assert versus_hf.main(ARGV) == 1
    out, err = capsys.readouterr()
    assert out == "" and "the logits differ by" in err


def test_mistakes_are_one_line(capsys):
    assert versus_hf.main(["model=dumy"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
