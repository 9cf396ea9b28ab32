import json

from gpt.cli import main

TINY = [
    *("--data.vocabulary", "null", "--model.config.vocab_size", "300"),
    *("--model.config.context_length", "16"),
    *("--model.config.emb_dim", "32", "--model.config.num_heads", "2", "--model.config.num_layers", "1"),
    *("--data.batch_size", "4", "--trainer.accelerator", "cpu", "--trainer.precision", "32-true"),
]


def test_a_profile_says_where_the_time_goes(text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    steps = ["--trainer.max_steps", "20", "--trainer.val_check_interval", "20"]
    assert main(["fit", "--data.corpus", str(text_file), "--run", "p", "--profile", *TINY, *steps]) == 0
    table = (tmp_path / "runs" / "p" / "profile.txt").read_text(encoding="utf-8")
    assert table.startswith("5 steps\n")
    assert "aten::addmm" in table
    events = json.loads((tmp_path / "runs" / "p" / "profile.json").read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event.get("name") == "aten::embedding" for event in events) >= 5
