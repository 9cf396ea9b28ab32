"""Programs that load the weights that `gpt export` writes."""

import torch
from programs.common import NEW, PROMPT, Guest, Place, close, equal


def transformers_text(place: Place) -> None:
    """Logits, ids, greedy text and a padded batch in transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = place.export("hf")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    given = tokenizer(PROMPT, return_tensors="pt")
    equal(place.prompt, given.input_ids[0].tolist())
    with torch.no_grad():
        close(place.model(given.input_ids), model(**given).logits)
    written = model.generate(**given, max_new_tokens=NEW, do_sample=False)[0, len(place.prompt) :]
    equal(place.new_ids, written.tolist())
    batch = tokenizer([PROMPT, "A"], padding=True, return_tensors="pt")
    equal(batch.input_ids.shape, (2, len(place.prompt)))


def ctranslate2_text(place: Place) -> None:
    """CTranslate2's converter and greedy text."""
    import ctranslate2
    from transformers import AutoTokenizer

    folder = place.folder / "ctranslate2"
    ctranslate2.converters.TransformersConverter(str(place.export("hf"))).convert(str(folder))
    generator = ctranslate2.Generator(str(folder))
    start = AutoTokenizer.from_pretrained(place.export("hf")).convert_ids_to_tokens(place.prompt)
    (result,) = generator.generate_batch(
        [start], max_length=NEW, sampling_topk=1, include_prompt_in_result=False
    )
    equal(place.new_ids, result.sequences_ids[0])


def llama_cpp_text(place: Place) -> None:
    """The ids of the prompt and the greedy text in llama.cpp, from our GGUF file."""
    from llama_cpp import Llama

    model = Llama(str(place.export("gguf") / "model.gguf"), n_ctx=128, verbose=False)
    equal(place.prompt, model.tokenize(PROMPT.encode(), add_bos=False))
    written = []
    for token in model.generate(place.prompt, temp=0.0, repeat_penalty=1.0):
        written.append(token)
        if len(written) == NEW:
            break
    equal(place.new_ids, written)


def harness_on_the_export(place: Place) -> None:
    """lm-evaluation-harness's `hf` on the export gives the accuracy of a forward pass."""
    from programs.harness import agree_with_ours, run

    agree_with_ours(place, run(place, "hf", {"pretrained": str(place.export("hf"))}))


GUESTS = (
    Guest(
        "transformers", "export: ids, logits, greedy text, padding", ("transformers",), ("transformers",),
        transformers_text,
    ),
    Guest(
        "CTranslate2", "its converter on the export, greedy text", ("ctranslate2",),
        ("ctranslate2", "transformers"), ctranslate2_text,
    ),
    Guest(
        "llama.cpp", "GGUF file: ids, greedy text", ("llama-cpp-python",), ("llama_cpp", "gguf"),
        llama_cpp_text,
    ),
    Guest(
        "lm-evaluation-harness",
        "`hf` on the export: log-probabilities and accuracy as by forward",
        ("lm_eval",), ("lm_eval", "transformers"), harness_on_the_export,
    ),
)  # fmt: skip
