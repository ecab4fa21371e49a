"""`z2a tokenizer eval` from the command line."""

from __future__ import annotations

import json

from zero2all.cli import main
from zero2all.tokenizer.lab.candidates import held_out_text


def test_eval_prints_tables_and_writes_json(trained_workspace, tmp_path, capsys):
    figures = tmp_path / "eval.json"
    words = ["tokenizer", "eval", "--work", str(trained_workspace.root), "--json", str(figures)]
    assert main([*words, "--against", str(trained_workspace.tokenizer), "--limit", "1MB"]) == 0
    shown = capsys.readouterr().out
    assert "zh bytes/token" in shown
    assert "Junk pieces" in shown
    assert set(json.loads(figures.read_text())["text"]["channels"]) == {"zh", "en"}


def test_eval_refuses_an_amount_that_is_none(trained_workspace, capsys):
    assert main(["tokenizer", "eval", "--work", str(trained_workspace.root), "--limit", "much"]) == 2
    assert "--limit is 'much'; expected an amount of text such as 20MB" in capsys.readouterr().err


def test_pack_says_which_engine_encoded(trained_workspace, capsys):
    assert main(["pack", "--work", str(trained_workspace.root)]) == 0
    assert "encoded by tokenizers (there is too little text" in capsys.readouterr().out


def test_held_out_text_takes_from_every_source_up_to_its_share(trained_workspace):
    whole = held_out_text(trained_workspace.corpus, "valid", 10_000_000)
    assert set(whole.channels) == {"zh", "en"}
    little = held_out_text(trained_workspace.corpus, "valid", 2000)
    for channel, texts in little.channels.items():
        assert texts == whole.channels[channel][: len(texts)]
        assert len(texts) == 1 or sum(len(text.encode()) for text in texts) <= 1000
