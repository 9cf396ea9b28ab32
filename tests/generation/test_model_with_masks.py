"""What the model passes on to its attention: caches, padding, documents and positions."""

import torch


def test_in_pieces_with_caches(model):
    tokens = torch.randint(0, 300, (2, 30))
    expected = model(tokens)
    caches = [block.attention.new_cache(2) for block in model.blocks]
    with torch.no_grad():
        pieces = [model(piece, caches=caches) for piece in tokens.split([13, 1, 1, 8, 7], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=1e-4, rtol=0)


def test_a_batch_padded_on_the_left(model):
    prompts = [torch.randint(0, 300, (length,)) for length in (3, 11, 7)]
    width = 11
    tokens = torch.stack([torch.cat([torch.zeros(width - len(p), dtype=torch.long), p]) for p in prompts])
    padding = torch.tensor([[column < width - len(p) for column in range(width)] for p in prompts])
    positions = (torch.arange(width) - padding.sum(dim=1, keepdim=True)).clamp(min=0)
    given = model(tokens, positions=positions, key_padding_mask=padding)
    for row, prompt in zip(given, prompts, strict=True):
        torch.testing.assert_close(row[-len(prompt) :], model(prompt[None])[0], atol=1e-4, rtol=0)
