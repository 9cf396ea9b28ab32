import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gpt import GPT, GPTConfig, Tokenizer
from gpt.cli import main
from gpt.data.module import TokenData
from gpt.data.prepare import prepare
from gpt.data.shards import Stream
from gpt.evaluation.evaluate import score_text
from gpt.evaluation.scoring import bits_per_byte, score_windows
from gpt.weights.rounding import rounded

TOKENIZER = Tokenizer("gpt2", vocab_size=300)


def window_nats(model, stream, most=10**9) -> np.ndarray:
    """The nats of each window of a stream."""
    prepared = SimpleNamespace(stream=lambda split: stream, template=None, tokenizer=TOKENIZER)
    return np.concatenate([nats for nats, _ in score_windows(model, prepared, "val", most)])


def test_windows_of_padding_alone_do_not_count():
    nats, sizes = np.array([9.0, 7.0, 8.0]), np.array([30, 40, 20])
    result = bits_per_byte(nats, sizes)
    assert result[1] == pytest.approx(0.0912, abs=1e-4)  # by hand
    assert bits_per_byte(np.append(nats, [0.0] * 9), np.append(sizes, [0] * 9)) == result
    assert bits_per_byte(np.array([9.0, 0.0]), np.array([30, 0]))[1] == math.inf


@pytest.fixture
def model(config):
    model = GPT(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return model


@pytest.fixture
def stream_of(tmp_path):
    def make(ids: list[int]) -> Stream:
        np.array(ids, "<u2").tofile(tmp_path / "tokens.bin")
        return Stream(tmp_path / "tokens.bin", np.dtype("<u2"), eot=299)

    return make


def uniform_model(config) -> GPT:
    """A model with all weights zero, which gives every token the probability 1 / V."""
    model = GPT(config).eval()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    return model


@torch.no_grad()
def nats_after(model, context: list[int], target: int) -> float:
    return -model(torch.tensor([context]))[0, -1].log_softmax(-1)[target].item()


def test_a_uniform_model_by_hand(config, tmp_path):
    """Four letters and `<|endoftext|>`: 5 tokens of ln 300 nats, over 4 bytes."""
    (tmp_path / "text.txt").write_text("wxyz", encoding="utf-8")
    result = score_text(uniform_model(config), TOKENIZER, str(tmp_path / "text.txt"))
    assert result["tokens"] == 5
    assert result["bytes"] == 4
    assert result["nats_per_token"] == pytest.approx(math.log(300), rel=1e-6)
    assert result["perplexity"] == pytest.approx(300, rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(5 * math.log2(300) / 4, rel=1e-6)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, 128, 300])
def test_every_token_once_with_the_context_of_its_window(length, model, stream_of):
    """Windows of 16 tokens, of which eight are scored together."""
    ids = torch.randint(0, 300, (length,)).tolist()
    expected = 0.0
    for target in range(length):
        expected += nats_after(model, [299, *ids][target // 16 * 16 : target + 1], ids[target])
    assert window_nats(model, stream_of(ids)).sum() == pytest.approx(expected, rel=1e-5)


def test_a_split_is_scored_as_validation_scores_it(model, text_file):
    data = TokenData(str(text_file), vocab_size=300, context_length=16, batch_size=4)
    nats = 0.0
    with torch.no_grad():
        for x, y in data.val_dataloader():
            nats += F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
    counts = data.prepared.counts["val"]
    folder = prepare(str(text_file), vocab_size=300)
    for source, split in ((str(text_file), "val"), (str(folder), None)):
        result = score_text(model, TOKENIZER, source, split)
        assert result["tokens"] == counts.tokens
        assert result["nats_per_token"] == pytest.approx(nats / counts.tokens, rel=1e-5)
        assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / counts.scored_bytes, rel=1e-5)


def test_the_command(model, text_file, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model")
    options = ["--checkpoint", str(tmp_path / "model"), "--data", str(text_file)]
    assert main(["evaluate", *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["split"] == "all"
    assert printed["bytes"] == text_file.stat().st_size
    assert printed["perplexity"] == pytest.approx(math.exp(printed["nats_per_token"]))


def test_the_command_scores_the_rounded_weights(text_file, tmp_path, capsys):
    config = GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=2, num_layers=1)
    model = GPT(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(tmp_path / "model")
    options = ["--checkpoint", str(tmp_path / "model"), "--data", str(text_file), "--precision", "int4"]
    assert main(["evaluate", *options]) == 0
    bits = json.loads(capsys.readouterr().out)["bits_per_byte"]
    assert bits == score_text(rounded(model, "int4"), TOKENIZER, str(text_file))["bits_per_byte"]
    assert bits != score_text(model, TOKENIZER, str(text_file))["bits_per_byte"]


BAD = {
    "no text": ([], "--data"),
    "no such text": (["--data", "nowhere"], "no corpus 'nowhere'"),
    "nothing held out": (["--data", "train"], "has no text to score in its split val"),
    "another vocabulary": (
        ["--data", "own"],
        "was prepared with vocab_size 300, not 300, or with another vocabulary",
    ),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(options, message, model, workplace, capsys):
    model.save_pretrained("model")
    words = "".join(f"{i * i} abc def ghi, " for i in range(600))
    (workplace / "words.txt").write_text(words, encoding="utf-8")
    prepare("words.txt", "own", vocabulary="learn:300")
    prepare("words.txt", "train", vocab_size=300, val_fraction=0.0)
    assert main(["evaluate", "--checkpoint", "model", *options]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("gpt evaluate: ") and message in last


def test_a_sample_has_windows_from_all_of_a_split(model, stream_of):
    """Each is scored as it is among all of them; of 96 tokens in windows of 16, every third, for 32."""
    stream = stream_of(list(range(1, 97)))
    everything = window_nats(model, stream)
    assert len(everything) == 6
    assert window_nats(model, stream, most=32) == pytest.approx(everything[::3])
