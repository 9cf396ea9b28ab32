"""Results decide which way computes: the program, `forward` with a cache, or `forward` alone."""

import shutil
from types import MethodType

import pytest
import torch
from torch import nn

from gpt import GPT, GPTConfig, generate
from gpt.errors import InputError
from gpt.generation import Engine, Request, build, decoding, for_decoding
from gpt.generation.compiled import Compiled
from gpt.generation.decoding import decoder_of
from gpt.generation.forward import Forward
from tests.generation.conftest import sharp, slow_greedy

CONFIG = GPTConfig(vocab_size=301, context_length=64, emb_dim=64, num_heads=4, num_layers=2)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("there is no compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPT_CACHE", str(tmp_path_factory.mktemp("built")))
        yield build.build()


@pytest.fixture(autouse=True)
def _tells_again():
    decoding._tell_once.cache_clear()


def replaced(path: str, module: nn.Module):
    def change(model):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, module)

    return change


class Capped(GPT):
    def forward(self, tokens, **options):
        return 5 * torch.tanh(super().forward(tokens, **options) / 5)


CHANGES = {
    "another epsilon": lambda model: setattr(model.final_norm, "eps", 1.0),
    "a norm without weights": replaced("final_norm", nn.LayerNorm(64, elementwise_affine=False)),
    "a norm without a bias": replaced("blocks.1.attention_norm", nn.LayerNorm(64, bias=False)),
    "another GELU": replaced("blocks.0.feed_forward.activation", nn.GELU()),
    "a narrow layer": lambda model: (
        replaced("blocks.0.feed_forward.up", nn.Linear(64, 96))(model),
        replaced("blocks.0.feed_forward.down", nn.Linear(96, 64))(model),
    ),
    "a smaller head": replaced("head", nn.Linear(64, 300, bias=False)),
    "another number of heads": lambda model: vars(model.blocks[1].attention).update(num_heads=2, head_dim=32),
    "a block less": lambda model: model.blocks.__delitem__(0),
    "a hook": lambda model: model.blocks[0].register_forward_hook(lambda *args: args[2] * 1.1),
    "a replaced method": lambda model: setattr(
        model.final_norm,
        "forward",
        MethodType(lambda self, x: -nn.LayerNorm.forward(self, x), model.final_norm),
    ),
    "an adapter": replaced("blocks.0.attention.W_query", nn.Sequential(nn.Linear(64, 64))),
    "capped logits": lambda model: setattr(model, "__class__", Capped),
    "a scaled embedding": replaced("token_embedding", nn.Sequential(nn.Embedding(301, 64))),
}


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_is_computed_by_its_own_forward(name, capsys):
    """Also where the change comes after the program was in use."""
    model = sharp(CONFIG)
    assert isinstance(decoder_of(model).way(model), Compiled)
    assert capsys.readouterr().err == ""
    CHANGES[name](model)
    way = decoder_of(model).way(model)
    assert isinstance(way, Forward)
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("gpt: PyTorch decodes, as the compiled program does not compute this model: ")
    if name not in (
        "a smaller head",
        "another number of heads",
        "a block less",
    ):  # whose forward fails or has no cache
        assert len(told) == 1 and way.cached
        assert generate(model, [[5, 6, 7]], max_new_tokens=70, temperature=0) == [
            slow_greedy(model, [5, 6, 7], 70)
        ]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", ["SiLU", "a scaled residual"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edits_of_freshly_made_models_are_seen(kind, dtype):
    """Whose residual branches add little."""
    model = GPT(GPTConfig(vocab_size=512, context_length=64, emb_dim=128, num_heads=2, num_layers=4)).to(
        dtype
    )
    assert isinstance(decoder_of(model).way(model), Compiled)
    for block in model.blocks:
        if kind == "SiLU":
            block.feed_forward.activation = nn.SiLU()
        else:
            block.register_forward_hook(lambda module, args, out: args[0] + (out - args[0]) / 2)
    assert isinstance(decoder_of(model).way(model), Forward)


@pytest.mark.usefixtures("built")
def test_it_is_found_out_once_and_again_after_a_change(monkeypatch):
    model, found = sharp(CONFIG), []
    original = decoding.Decoder._find_out
    monkeypatch.setattr(
        decoding.Decoder, "_find_out", lambda self, *args: found.append(1) or original(self, *args)
    )
    for _ in range(3):
        generate(model, [[1, 2]], max_new_tokens=3)
    assert len(found) == 1
    with torch.no_grad():
        model.blocks[0].feed_forward.up.weight.mul_(0.5)
    for _ in range(2):
        assert generate(model, [[1, 2]], max_new_tokens=9, temperature=0) == [slow_greedy(model, [1, 2], 9)]
    assert len(found) == 2
    model.head.weight.data = model.head.weight.data.clone()
    generate(model, [[1, 2]], max_new_tokens=3)
    assert len(found) == 3


def test_what_is_found_out_does_not_keep_a_model_alive():
    import gc
    import weakref

    model = sharp(CONFIG)
    generate(model, [[1, 2]], max_new_tokens=3)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_cache_that_changes_logits_is_not_used(capsys):
    """As positions that are counted from the first token given."""
    model = sharp(GPTConfig(vocab_size=301, context_length=64, emb_dim=48, num_heads=4, num_layers=2))
    original = model.features
    counted = torch.arange(64)
    model.features = lambda tokens, positions=None, **options: original(
        tokens, positions=counted[: tokens.shape[1]], **options
    )
    assert generate(model, [[5, 6, 7], [9]], max_new_tokens=20, temperature=0) == [
        slow_greedy(model, [5, 6, 7], 20),
        slow_greedy(model, [9], 20),
    ]
    assert "each token reads its text anew" in capsys.readouterr().err


@pytest.mark.usefixtures("built")
def test_a_text_stays_with_what_it_began_with(monkeypatch):
    model = sharp(CONFIG)
    engine, program = Engine(model), build.program()
    monkeypatch.setattr(build, "program", lambda: None)
    engine.add(Request(tokens=[1], max_new_tokens=6))
    engine.step()
    monkeypatch.setattr(build, "program", lambda: program)
    engine.add(Request(tokens=[2], max_new_tokens=3))
    while engine.busy:
        assert isinstance(engine._way, Forward)
        engine.step()
    engine.add(Request(tokens=[1], max_new_tokens=6))
    assert isinstance(engine._way, Compiled)


def test_widths_that_vectors_do_not_divide_are_pytorchs(built, capsys):
    narrow = sharp(GPTConfig(vocab_size=50, context_length=32, emb_dim=48, num_heads=3, num_layers=1))
    assert isinstance(decoder_of(narrow).way(narrow), Forward)
    assert capsys.readouterr().err == ""


def test_a_precision_is_set_in_place():
    model = sharp(CONFIG).train()
    assert for_decoding(model, "bfloat16") is model and not model.training
    assert model.head.weight.dtype == torch.bfloat16
    assert for_decoding(model).head.weight.dtype == torch.bfloat16
    assert for_decoding(model, "float32").head.weight.dtype == torch.float32


def test_what_cannot_be_is_refused(monkeypatch, tmp_path, built):
    with pytest.raises(InputError, match="int4"):
        for_decoding(sharp(CONFIG), "int4")
    with pytest.raises(InputError, match="int8 is for a CPU"):
        for_decoding(sharp(CONFIG).to("meta"), "int8")
    changed = sharp(CONFIG)
    changed.final_norm.eps = 1.0
    with pytest.raises(InputError, match="int8 is for an unchanged model"):
        for_decoding(changed, "int8")
    monkeypatch.setenv("GPT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(InputError, match=r"cannot be compiled.*/no/such/compiler"):
        for_decoding(sharp(CONFIG), "int8")
