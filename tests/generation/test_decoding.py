"""When it is found out which way computes, and the precision of a model."""

import gc
import weakref

import pytest
import torch

from gpt import GPTConfig, generate
from gpt.errors import InputError
from gpt.generation import Engine, Request, build, compiled, for_decoding
from gpt.generation.compiled import Compiled
from gpt.generation.decoding import backend_of
from gpt.generation.forward import Forward
from tests.generation.conftest import sharp, slow_greedy

CONFIG = GPTConfig(vocab_size=301, context_length=64, emb_dim=64, num_heads=4, num_layers=2)


@pytest.mark.usefixtures("built")
def test_it_is_found_out_once_and_again_after_a_change():
    model, calls = sharp(CONFIG), []
    model.register_forward_hook(lambda *_: calls.append("forward"))  # the program calls none

    def write():
        calls.clear()
        return generate(model, [[1, 2]], max_new_tokens=9, temperature=0)

    write()
    assert calls == ["forward"]
    write()
    assert calls == []

    with torch.no_grad():
        model.blocks[0].feed_forward.up.weight.mul_(0.5)
    written = write()
    assert calls == ["forward"]
    assert written == [slow_greedy(model, [1, 2], 9)]
    write()
    assert calls == []

    model.head.weight.data = model.head.weight.data.clone()
    write()
    assert calls == ["forward"]


def test_what_is_found_out_does_not_keep_a_model_alive():
    model = sharp(CONFIG)
    generate(model, [[1, 2]], max_new_tokens=3)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


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
        assert isinstance(engine._backend, Forward)
        engine.step()
    engine.add(Request(tokens=[1], max_new_tokens=6))
    engine.step()
    assert isinstance(engine._backend, Compiled)


def test_a_precision_is_set_in_place():
    model = sharp(CONFIG).train()
    assert for_decoding(model, "bfloat16") is model and not model.training
    assert model.head.weight.dtype == torch.bfloat16
    assert for_decoding(model).head.weight.dtype == torch.bfloat16
    assert for_decoding(model, "float32").head.weight.dtype == torch.float32


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("rounding", ["int8", "int4"])
def test_rounding_is_the_engines_and_leaves_the_model_alone(rounding):
    """A model can be decoded by two engines at once, of which only one rounds the weights."""
    model = for_decoding(sharp(CONFIG), rounding)

    def scores(backend):
        engine = Engine(model, backend=backend)
        engine.add(Request(tokens=[1, 2], max_new_tokens=20, seed=0, alternatives=0))
        scores = [token.log_probability for token in engine.run()]
        assert engine._backend.rounding == (None if backend == "auto" else backend)
        return scores

    exact, rounded = scores("auto"), scores(rounding)
    assert exact != rounded
    assert (scores("auto"), scores(rounding)) == (exact, rounded)
    model.final_norm.eps = 1.0
    with pytest.raises(InputError, match=f"{rounding} is for an unchanged model"):
        generate(model, [[1]], max_new_tokens=1, backend=rounding)
    model.final_norm.eps = 1e-5
    assert backend_of(model).rounding is None


@pytest.mark.usefixtures("built")
def test_pytorch_can_be_chosen():
    model = sharp(CONFIG)
    assert isinstance(backend_of(model), Compiled)
    assert isinstance(backend_of(model, "pytorch"), Forward)
    written = generate(model, [[1, 2]], max_new_tokens=9, temperature=0, backend="pytorch")
    assert written == [slow_greedy(model, [1, 2], 9)]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("rounding", ["int8", "int4"])
def test_only_the_program_rounds(rounding, monkeypatch, tmp_path):
    changed = sharp(CONFIG)
    changed.final_norm.eps = 1.0
    for model in (changed, sharp(CONFIG).to("meta")):
        with pytest.raises(InputError, match=f"{rounding} is for an unchanged model on a CPU"):
            for_decoding(model, rounding)
    monkeypatch.setenv("GPT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(InputError, match=r"cannot be compiled.*/no/such/compiler"):
        for_decoding(sharp(CONFIG), rounding)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("rounding", ["int8", "int4"])
def test_a_program_that_rounds_in_another_way_is_not_used(rounding, monkeypatch):
    """Its logits in float32 are right."""
    packed = compiled.rounded_weight
    monkeypatch.setattr(compiled, "rounded_weight", lambda name, weight, to: packed(name, -weight, to))
    with pytest.raises(InputError, match=f"{rounding} is for an unchanged model"):
        for_decoding(sharp(CONFIG, seed=7), rounding)  # no other test has noted these weights
