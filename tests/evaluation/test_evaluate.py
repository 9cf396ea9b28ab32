import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_runs import gpt, trainer
from torch.nn import functional as F

from gpt import GPT, GPTConfig, Tokenizer
from gpt.data.module import TokenData
from gpt.data.options import DEFAULT_READING
from gpt.data.prepare import prepare, prepare_named
from gpt.data.prepared import Stream
from gpt.errors import InputError
from gpt.evaluation.evaluate import score_text
from gpt.evaluation.scoring import batches_of, bits_per_byte, score_windows, scored_features
from gpt.text.template import Template
from gpt.training.module import LanguageModel
from gpt.weights.commands import write_export
from gpt.weights.load import StoredModel
from gpt.weights.rounding import rounded
from tests.generation.conftest import sharp

TOKENIZER = Tokenizer("gpt2", vocab_size=300)


def score_of(model: GPT, data: str, split: str | None = None) -> dict:
    """The score of a text, or of a part of it."""
    reading = DEFAULT_READING if split else replace(DEFAULT_READING, val_fraction=0.0)
    return score_text(model, prepare_named(data, TOKENIZER, reading), split or "train", data)


def test_windows_of_padding_alone_do_not_count():
    nats, sizes = np.array([9.0, 7.0, 8.0]), np.array([30, 40, 20])
    result = bits_per_byte(nats, sizes)
    assert result[1] == pytest.approx(0.0912, abs=1e-4)  # by hand
    assert bits_per_byte(np.append(nats, [0.0] * 9), np.append(sizes, [0] * 9)) == result
    assert bits_per_byte(np.array([9.0, 0.0]), np.array([30, 0]))[1] == math.inf


@pytest.fixture
def model(config):
    return sharp(config, std=0.15)


@pytest.fixture
def window_nats(model, tmp_path):
    """The nats of each window of a text of these ids."""

    def score(ids: list[int], most: int = 10**9) -> np.ndarray:
        np.array(ids, "<u2").tofile(tmp_path / "tokens.bin")
        stream = Stream(tmp_path / "tokens.bin", np.dtype("<u2"), eot=299)
        prepared = SimpleNamespace(stream=lambda split: stream, template=None, tokenizer=TOKENIZER)
        return score_windows(model, prepared, "val", most)[0]

    return score


@torch.no_grad()
def test_with_isolate_the_loss_is_that_of_validation(config, tmp_path):
    """Attention within documents, where the temperature is found as in the run's validation."""
    rows = [json.dumps({"text": f"{n * n} is {n}"}) for n in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows), "utf-8")
    sizes = {"vocab_size": 300, "context_length": config.context_length}
    data = TokenData(str(tmp_path / "a.jsonl"), **sizes, val_fraction=0.5, isolate=True)
    module = LanguageModel(config)
    module.model.load_state_dict(sharp(config, std=0.15).state_dict())
    (measured,) = trainer().validate(module, datamodule=data, verbose=False)

    def nats_per_token(isolate: bool) -> float:
        model, nats = module.model.eval(), 0.0
        for batch in batches_of(data.prepared, "val", config.context_length, isolate=isolate):
            features, targets = scored_features(model, *batch)
            nats += F.cross_entropy(model.head(features), targets, reduction="sum").item()
        return nats / data.prepared.counts["val"].scored_tokens

    assert nats_per_token(True) == pytest.approx(measured["val_loss"], rel=1e-5)
    assert nats_per_token(False) != pytest.approx(measured["val_loss"], rel=1e-4)


def test_a_uniform_model_by_hand(config, tmp_path):
    """Four letters and `<|endoftext|>`: 5 tokens of ln 300 nats, over 4 bytes."""
    model = GPT(config).eval()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    (tmp_path / "text.txt").write_text("wxyz", encoding="utf-8")
    result = score_of(model, str(tmp_path / "text.txt"))
    assert (result["tokens"], result["bytes"]) == (5, 4)
    assert result["nats_per_token"] == pytest.approx(math.log(300), rel=1e-6)
    assert result["perplexity"] == pytest.approx(300, rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(5 * math.log2(300) / 4, rel=1e-6)


@pytest.mark.parametrize("length", [1, 16, 17, 300])
@torch.no_grad()
def test_every_token_once_with_the_context_of_its_window(length, model, window_nats):
    """Windows of 16 tokens, of which eight are scored together."""
    ids = torch.randint(0, 300, (length,)).tolist()
    expected = 0.0
    for place, id_ in enumerate(ids):
        context = [299, *ids][place // 16 * 16 : place + 1]
        expected -= model(torch.tensor([context]))[0, -1].log_softmax(-1)[id_].item()
    assert window_nats(ids).sum() == pytest.approx(expected, rel=1e-5)


def test_a_sample_has_windows_from_all_of_a_split(window_nats):
    """Each is scored as it is among all of them; of 96 tokens in windows of 16, every third, for 32."""
    everything = window_nats(range(1, 97))
    assert len(everything) == 6
    assert window_nats(range(1, 97), most=32) == pytest.approx(everything[::3])


def test_an_empty_split_is_one_line(window_nats):
    with pytest.raises(InputError, match="there is no text to score in the split val"):
        window_nats([])


@torch.no_grad()
def test_a_split_is_scored_as_validation_scores_it(model, text_file):
    data = TokenData(str(text_file), vocab_size=300, context_length=16, batch_size=4)
    nats = 0.0
    for x, y in data.val_dataloader():
        nats += F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
    counts = data.prepared.counts["val"]
    folder = prepare(str(text_file), vocab_size=300)
    for source in (text_file, folder):
        result = score_of(model, str(source), "val")
        assert result["tokens"] == counts.tokens
        assert result["nats_per_token"] == pytest.approx(nats / counts.tokens, rel=1e-5)
        assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / counts.scored_bytes, rel=1e-5)


def test_the_command_scores_the_rounded_weights(text_file, tmp_path, capsys):
    model = sharp(
        GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=2, num_layers=1), std=0.15
    )
    model.save_pretrained(tmp_path / "model")
    assert gpt(f"evaluate --checkpoint {tmp_path}/model --data {text_file} --precision int4") == 0
    printed = json.loads(capsys.readouterr().out)
    expected = score_of(rounded(model, "int4"), str(text_file))
    assert printed == {"data": str(text_file), "split": "all", **expected}
    assert printed["bits_per_byte"] != score_of(model, str(text_file))["bits_per_byte"]


BAD = {
    "no text": ("", "--data"),
    "nothing held out": ("--data train", "has no text to score in its split val"),
    "a fraction without a split": (
        "--data words.txt --val_fraction 2",
        "--val_fraction divides the text: give --split train or --split val",
    ),
    "another share of what is prepared": (
        "--data train --split val --val_fraction 0.3",
        "train is prepared already: to have it with another val_fraction, give the text itself",
    ),
    "another vocabulary": ("--data own", "prepared with vocab_size 300, not 300, or with another vocabulary"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(options, message, model, workplace, refusal):
    model.save_pretrained("model")
    words = "".join(f"{i * i} abc def ghi, " for i in range(600))
    (workplace / "words.txt").write_text(words, encoding="utf-8")
    prepare("words.txt", "own", vocabulary="learn:300")
    prepare("words.txt", "train", vocab_size=300, val_fraction=0.0)
    assert message in refusal(f"evaluate --checkpoint model {options}")


def test_examples_that_were_prepared_with_another_template_are_refused(model, workplace, refusal):
    """Those with the model's own are scored."""
    own = Template(user="Q: {content}\n", assistant="A: {content}")
    weights = StoredModel("gpt", model.config, model.state_dict(), TOKENIZER, own)
    write_export(weights, workplace / "model", "hf")
    rows = "".join(f'{{"prompt": "{i}", "completion": "{i * i}"}}\n' for i in range(60))
    (workplace / "rows.jsonl").write_text(rows, encoding="utf-8")
    prepare("rows.jsonl", "other", vocab_size=300)
    prepare("rows.jsonl", "same", vocab_size=300, template=own)
    command = "evaluate --checkpoint model --data"
    assert "other was prepared with another template than the checkpoint's" in refusal(f"{command} other")
    assert gpt(f"{command} same") == 0
