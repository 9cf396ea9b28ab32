"""When it is found out which way computes, and the precision of a model."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from gpt import generate
from gpt.errors import InputError
from gpt.generation import Engine, Request, build, compiled, decoding, for_decoding
from gpt.generation.compiled import Compiled
from gpt.generation.decoding import backend_of
from gpt.generation.forward import Forward
from tests.generation.conftest import CONFIG, sharp, slow_greedy


@pytest.mark.usefixtures("built")
def test_it_is_found_out_once_and_again_after_a_change():
    model, calls = sharp(), []
    model.register_forward_hook(lambda *_: calls.append("forward"))  # the program calls none

    def calls_in_writing() -> int:
        calls.clear()
        (written,) = generate(model, [[1, 2]], max_new_tokens=9, temperature=0)
        count = len(calls)
        assert written == slow_greedy(model, [1, 2], 9)
        return count

    assert [calls_in_writing(), calls_in_writing()] == [1, 0]
    with torch.no_grad():
        model.blocks[0].feed_forward.up.weight.mul_(0.5)
    assert [calls_in_writing(), calls_in_writing()] == [1, 0]
    model.head.weight.data = model.head.weight.data.clone()
    assert calls_in_writing() == 1


def test_what_is_found_out_does_not_keep_a_model_alive():
    model = sharp()
    generate(model, [[1, 2]], max_new_tokens=3)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("built")
def test_a_text_stays_with_what_it_began_with(monkeypatch):
    engine, program = Engine(sharp()), build.program()
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
    model = sharp().train()
    assert for_decoding(model, "bfloat16") is model and not model.training
    assert model.head.weight.dtype == torch.bfloat16
    assert for_decoding(model).head.weight.dtype == torch.bfloat16
    assert for_decoding(model, "float32").head.weight.dtype == torch.float32


@pytest.mark.usefixtures("built")
def test_a_model_is_decoded_in_the_precision_that_was_chosen_last():
    """Rounding leaves its weights as they are."""
    model = sharp()

    def scores(precision):
        engine = Engine(for_decoding(model, precision))
        engine.add(Request(tokens=[1, 2], max_new_tokens=20, seed=0, alternatives=0))
        return [token.logprobs.chosen for token in engine.run()]

    exact, rounded = scores("float32"), scores("int8")
    assert exact != rounded
    assert [scores(precision) for precision in (None, "float32", None)] == [rounded, exact, exact]


@pytest.mark.usefixtures("built")
def test_pytorch_can_be_chosen_unless_weights_are_rounded():
    model = sharp()
    assert isinstance(backend_of(model), Compiled)
    assert isinstance(backend_of(model, "pytorch"), Forward)
    for_decoding(model, "int8")
    with pytest.raises(InputError, match="only the compiled program decodes in int8"):
        backend_of(model, "pytorch")


UNSUITABLE = {
    "another device": (lambda: sharp().to("meta"), "int4 is for a model on a CPU"),
    "a width": (lambda: sharp(replace(CONFIG, emb_dim=48, num_heads=3)), "of a width that 32 divides"),
    "a context": (
        lambda: sharp(replace(CONFIG, context_length=5)),
        "int4 is for a context of 6 tokens or more",
    ),
}


@pytest.mark.parametrize(("model", "message"), UNSUITABLE.values(), ids=UNSUITABLE)
def test_a_model_that_cannot_be_rounded_is_not_even_compared(model, message, monkeypatch):
    """Nor is the program built."""
    monkeypatch.setattr(build, "build", None)
    with pytest.raises(InputError, match=message):
        for_decoding(model(), "int4")


@pytest.mark.usefixtures("built")
def test_only_the_program_rounds(monkeypatch, tmp_path, capsys):
    changed = sharp()
    changed.final_norm.eps = 1.0
    decoding.notice_once.cache_clear()
    for _ in range(2):
        with pytest.raises(InputError, match=r"int4 is for an unchanged model, but .* differ by"):
            for_decoding(changed, "int4")
    assert "PyTorch decodes" not in capsys.readouterr().err
    monkeypatch.setenv("GPT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(InputError, match=r"cannot be compiled.*/no/such/compiler"):
        for_decoding(sharp(), "int4")


@pytest.mark.usefixtures("built")
def test_a_program_that_rounds_in_another_way_is_not_used(monkeypatch):
    """Its logits in float32 are right."""
    packed = compiled.rounded_weight
    monkeypatch.setattr(compiled, "rounded_weight", lambda name, weight, to: packed(name, -weight, to))
    with pytest.raises(InputError, match="int8 is for an unchanged model"):
        for_decoding(sharp(seed=7), "int8")  # no other test has noted these weights
