import numpy as np
import pytest

from gpt.data.prepare import prepare
from gpt.data.shards import Prepared
from gpt.errors import InputError
from gpt.pictures.inspect import inspect
from gpt.text.tokenizer import Tokenizer


def test_what_inspect_says(rows, texts, tmp_path, capsys):
    folder = prepare(str(rows), tmp_path / "out", vocab_size=500, val_fraction=0.3)
    inspect(str(folder), windows=2, context_length=32)
    said = capsys.readouterr().out
    train = Prepared(folder).meta["splits"]["train"]
    assert (
        f"train       {train['documents']:,} documents, {train['bytes']:,} bytes, {train['tokens']:,} tokens"
        in said
    )
    assert f"{train['bytes'] / train['tokens']:.2f} bytes a token" in said
    assert "all 4 files are as they were written" in said
    assert said.count("--- 32 tokens of the training text") == 2
    shown = said.split("--- 32 tokens of the training text\n")[1].strip("\n\ufffd ")
    assert len(shown) > 10
    assert (folder / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert prepare(str(rows), folder, vocab_size=500, val_fraction=0.3) == folder  # the picture is no harm


def test_lengths_are_those_of_the_documents(rows, texts, tmp_path):
    prepared = Prepared(prepare(str(rows), tmp_path / "out", vocab_size=500, val_fraction=0.0))
    tokenizer = Tokenizer("gpt2", vocab_size=500)
    found = np.concatenate([prepared.document_lengths(split) for split in ("train", "val")])
    assert sorted(found.tolist()) == sorted(len(tokenizer.encode(text)) + 1 for text in texts)


def test_a_corpus_is_prepared_first_and_the_picture_goes_elsewhere(rows, tmp_path, capsys):
    inspect(str(rows), vocab_size=500, picture=str(tmp_path / "a.png"), windows=0)
    assert (tmp_path / "a.png").exists()
    assert "500 ids" in capsys.readouterr().out


def test_tokens_of_a_learned_vocabulary_are_shown(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one two three, one two three; " * 300, encoding="utf-8")
    inspect(str(tmp_path / "a.txt"), vocabulary="learn:266", windows=0)
    said = capsys.readouterr().out
    assert "own, 266 ids" in said
    assert "beginning   'one' " in said
    assert "longest     ' three'" in said


def test_an_altered_file_is_an_error(rows, tmp_path, capsys):
    folder = prepare(str(rows), tmp_path / "out", vocab_size=500)
    data = bytearray((folder / "train-00000.bin").read_bytes())
    data[10] ^= 1
    (folder / "train-00000.bin").write_bytes(data)
    with pytest.raises(InputError, match=r"train-00000.bin was altered"):
        inspect(str(folder))
    assert not (folder / "lengths.png").exists()


def test_several_vocabularies_are_compared(tmp_path, capsys):
    line = "one two three, one two three; " * 2
    (tmp_path / "a.txt").write_text(f"{line}\n" * 100, encoding="utf-8")
    picture = tmp_path / "cut.png"
    inspect(str(tmp_path / "a.txt"), vocabulary="gpt2:257,learn:266,learn:chars", picture=str(picture))
    *blocks, last = capsys.readouterr().out.split("\n\n")
    cut = {block.partition(":")[0]: block.rpartition("cut         ")[2].split("|") for block in blocks}
    assert [block.partition(": ")[0] for block in blocks] == ["gpt2:257", "learn:266", "learn:chars"]
    assert blocks[2].startswith("learn:chars: 1.00 bytes a token")
    assert cut["gpt2"] == list(line.replace(" ", "·"))  # all 256 of its ids are bytes
    assert "".join(cut["learn"]) == line.replace(" ", "·")
    assert "longest     ' three'" in blocks[1]
    assert "·three" in blocks[1].rpartition("cut         ")[2].split("|")
    assert last == f"picture     {picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_pictures_of_others_are_not_replaced(rows, tmp_path, capsys):
    folder = str(prepare(str(rows), tmp_path / "out", vocab_size=500))
    (tmp_path / "a.png").write_text("mine", encoding="utf-8")
    for vocabulary in (None, "gpt2:257,gpt2:300"):
        with pytest.raises(InputError, match=r"a\.png exists already: .*--overwrite"):
            inspect(folder, vocabulary=vocabulary, picture=str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_text(encoding="utf-8") == "mine"
    inspect(folder, picture=str(tmp_path / "a.png"), overwrite=True, windows=0)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_single_example_is_described(tmp_path, capsys):
    """None of it is held out."""
    (tmp_path / "a.csv").write_text("prompt,completion\nHi,you\n", encoding="utf-8")
    inspect(str(tmp_path / "a.csv"), vocab_size=300, windows=1, context_length=1000)
    said = capsys.readouterr().out
    assert "val         0 documents" in said and " of them scored, of " in said
    assert said.endswith("### Instruction:\nHi\n\n### Response:\nyou<|endoftext|>\n")
    pictures = {"picture": str(tmp_path / "a.png")}
    inspect(str(tmp_path / "a.csv"), vocabulary="gpt2:257,gpt2:300", **pictures)
