"""Programs that load the weights that `gpt export` writes."""

import torch
from programs.common import NEW, PROMPT, Place, close, equal, guest
from programs.harness import HarnessTasks


@guest("transformers")
def transformers_text(place: Place) -> None:
    """export: ids, logits, greedy text, padding"""
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


@guest("ctranslate2", "transformers")
def ctranslate2_text(place: Place) -> None:
    """its converter on the export, greedy text"""
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


@guest("llama-cpp-python", "gguf")
def llama_cpp_text(place: Place) -> None:
    """GGUF file: ids, greedy text"""
    from llama_cpp import Llama

    model = Llama(str(place.export("gguf") / "model.gguf"), n_ctx=128, verbose=False)
    equal(place.prompt, model.tokenize(PROMPT.encode(), add_bos=False))
    written = []
    for token in model.generate(place.prompt, temp=0.0, repeat_penalty=1.0):
        written.append(token)
        if len(written) == NEW:
            break
    equal(place.new_ids, written)


@guest("lm_eval", "transformers")
def harness_on_the_export(place: Place) -> None:
    """`hf` on the export: log-probabilities as by forward"""
    HarnessTasks(place).compare_endings("hf", {"pretrained": str(place.export("hf"))})
