"""A typed prompt that ends inside a token is continued as if it did not."""

from collections.abc import Sequence

import pytest
import torch

from gpt import GPT, GPTConfig, Tokenizer, generate
from gpt.errors import InputError
from gpt.generation import Engine, Request, Sampling, stream_samples
from gpt.generation.healing import typed_prompt
from gpt.text.tokenizer import last_word
from gpt.text.vocabulary import Learned, learn
from tests.generation.conftest import sharp

GREEDY = Sampling(temperature=0)
SENTENCE = "We'll see the functional methodology:\n\n    return naïve 3.14 日本語 unhappily, they'd said; it's over"
# Many neighbours of the sentence's words, so that learned vocabularies have tokens that cut them elsewhere.
TEXT = " ".join(
    [
        SENTENCE,
        "function functions unction method methodical odology hap happy unhappy happily ill will'll well",
        "see seen these there they then retur turn turned urn over cover overt said aid sail I'd they've we're",
        "the theme thematic other logy logic local national nation 日本 日本人 本語 31 314 14 naive caf café",
    ]
    * 3
)


def vocabulary(size: int) -> Tokenizer:
    if size > 50000:
        return Tokenizer()
    if size > 2000:  # as many tokens as that has no short text
        return Tokenizer("gpt2", vocab_size=size)
    return learn([TEXT], Learned(size))


def memorised(tokenizer: Tokenizer, sentence: str) -> GPT:
    """A model that has learned a sentence by heart, at the beginning of a document and of a window."""
    torch.manual_seed(0)
    ids = [tokenizer.eot, *tokenizer.encode(sentence), tokenizer.eot]
    size = {"emb_dim": 32, "num_heads": 1, "num_layers": 1, "context_length": 4 * len(ids)}
    model = GPT(GPTConfig(vocab_size=tokenizer.n_vocab, **size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0)
    for _ in range(400):
        loss = torch.zeros(())
        for text in (torch.tensor(ids), torch.tensor(ids[1:])):
            loss = loss + torch.nn.functional.cross_entropy(model(text[None, :-1])[0], text[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.002:
            break
    assert loss.item() < 0.05
    return model.eval()


def continued(model: GPT, tokenizer: Tokenizer, prompt: str | Sequence[int], **settings) -> str:
    how = {"max_new_tokens": 200, "sampling": GREEDY, **settings}
    return "".join(piece for _, piece in stream_samples(model, tokenizer, prompt, **how))


@pytest.mark.parametrize("size", [300, 350, 420, 1000, 2048, 8192, 50257])
def test_every_prefix_of_a_memorised_sentence_is_continued_by_its_rest(size):
    tokenizer = vocabulary(size)
    model = memorised(tokenizer, SENTENCE)
    wrong = {
        SENTENCE[:end]: text
        for end in range(len(SENTENCE))
        if (text := continued(model, tokenizer, SENTENCE[:end])) != SENTENCE[end:]
    }
    assert not wrong
