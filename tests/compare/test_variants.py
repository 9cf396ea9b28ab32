"""What the words of `gpt compare` mean."""

import pytest

from gpt.compare.variants import OUR_SOURCE, parse_variants, slug
from gpt.errors import InputError

LR = "--model.optimizer.lr 3e-3"
QUICK = "--config quick"


def parsed(words):
    """The name and the options of each variant."""
    return [(variant.name, " ".join(variant.words)) for variant in parse_variants(words.split())]


def test_words_are_variants_and_options_a_change_of_the_base():
    assert parsed("quick deep/other.yaml") == [("quick", QUICK), ("other", "--config deep/other.yaml")]
    assert parsed(f"base.yaml {LR}")[1] == ("lr=3e-3", f"--config base.yaml {LR}")
    without_a_base = [("quick", QUICK), ("lr=3e-3", f"{QUICK} {LR}")]
    assert parsed(LR) == parsed(f"vs {LR}") == without_a_base
    assert parsed("quick --trainer.devices -1")[1] == ("devices=-1", f"{QUICK} --trainer.devices -1")


def test_vs_stands_between_variants_and_the_options_of_the_first_hold_for_all():
    variants = parsed(f"quick --data.batch_size 6 vs {LR} vs other.yaml --model.compile vs --x=-1")
    assert variants == [
        ("quick batch_size=6", f"{QUICK} --data.batch_size 6"),
        ("lr=3e-3", f"{QUICK} --data.batch_size 6 {LR}"),
        ("other compile", "--config other.yaml --data.batch_size 6 --model.compile"),
        ("x=-1", f"{QUICK} --data.batch_size 6 --x=-1"),
    ]


def test_a_folder_is_a_source_that_is_run(workplace):
    (workplace / "copy" / "gpt").mkdir(parents=True)
    (workplace / "copy" / "gpt" / "__init__.py").touch()
    words = f"quick vs copy vs ./copy/ {LR}"
    base, edited, changed = parse_variants(words.split())
    assert base.source == OUR_SOURCE and (OUR_SOURCE / "gpt" / "cli.py").is_file()
    assert edited.source == changed.source == workplace / "copy"
    assert parsed(words)[1:] == [("copy", QUICK), ("copy lr=3e-3", f"{QUICK} {LR}")]
    assert {variant.source for variant in parse_variants(f"copy {LR}".split())} == {workplace / "copy"}


REFUSED = {
    "one variant": ("quick", "two variants"),
    "nothing after a vs": ("quick vs", "nothing stands after a 'vs'"),
    "options after two variants": (f"quick lora {LR}", "quick vs lora"),
    "two variants and a vs": (f"quick lora vs {LR}", "quick vs lora"),
    "one variant twice": ("quick quick", "two variants are 'quick'"),
    "two files of a name": ("a/my.yaml b/my.yaml", "both are called 'my'"),
    "two options of a name": ("quick vs --a.x 1 vs --b.x 1", "both are called 'x=1'"),
    "what all variants share": ("quick --trainer.max_steps=5", "--steps"),
    "another text held out": (f"quick vs {LR} --data.template.user x", "before the first 'vs'"),
    "a folder without a package": ("quick empty", "has no gpt/__init__.py"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_what_compares_nothing_is_refused(words, message, workplace):
    (workplace / "empty").mkdir()
    with pytest.raises(InputError, match=message):
        parse_variants(words.split())


def test_names_of_folders():
    assert slug("quick vs lr=3e-3") == "quick-vs-lr=3e-3"
    assert slug("../a b/") == "a-b"
    assert slug("///") == "x"
    assert len(slug("a" * 300)) == 60
    assert slug("é" * 300) == "é" * 30
    assert slug("a" + "语" * 300) == "a" + "语" * 19
