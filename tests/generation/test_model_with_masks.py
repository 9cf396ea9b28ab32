"""What the model passes on to its attention: caches."""

import torch


def test_in_pieces_with_caches(model):
    tokens = torch.randint(0, 300, (2, 30))
    expected = model(tokens)
    caches = [block.attention.new_cache(2) for block in model.blocks]
    with torch.no_grad():
        pieces = [model(piece, caches=caches) for piece in tokens.split([13, 1, 1, 8, 7], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=1e-4, rtol=0)
