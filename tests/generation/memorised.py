"""A sentence, vocabularies that cut its words in many ways, and models that have memorised it."""

import torch

from gpt import GPT, GPTConfig, Tokenizer
from gpt.text.vocabulary import VocabularyToLearn, learn

SENTENCE = (
    "We'll see the functional methodology:\n\n    return naïve 3.14 日本語 unhappily, they'd said; it's over"
)
# Many neighbours of the sentence's words, so that learned vocabularies have tokens that cut them elsewhere.
TEXT = " ".join(
    [
        SENTENCE,
        "function functions unction method methodical odology hap happy unhappy happily ill will'll well",
        "see seen these there they then retur turn turned urn over cover overt said aid sail I'd they've",
        "the theme thematic other logy logic local national nation 日本 日本人 本語 31 314 14 naive caf café",
    ]
    * 3
)


def vocabulary(size: int) -> Tokenizer:
    """A vocabulary of this size: learned from the text, or GPT-2's, whose first 2048 tokens are one too."""
    if size > 50000:
        return Tokenizer()
    if size > 2000:  # the text is too short to learn so many
        return Tokenizer("gpt2", vocab_size=size)
    return learn([TEXT], VocabularyToLearn(size))


def memorised(tokenizer: Tokenizer) -> GPT:
    """A model that has memorised the sentence, at the beginning of a document and of a window."""
    torch.manual_seed(0)
    ids = torch.tensor([tokenizer.eot, *tokenizer.encode(SENTENCE), tokenizer.eot])
    size = {"emb_dim": 32, "num_heads": 1, "num_layers": 1, "context_length": 512}
    model = GPT(GPTConfig(vocab_size=tokenizer.n_vocab, **size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0)
    for _ in range(400):
        loss = torch.zeros(())
        for text in (ids, ids[1:]):
            loss = loss + torch.nn.functional.cross_entropy(model(text[None, :-1])[0], text[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.02:
            break
    assert loss.item() < 0.05
    return model.eval()
