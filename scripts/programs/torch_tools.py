"""Programs that change, compile or export a PyTorch module."""

from typing import TYPE_CHECKING

import torch
from programs.common import NEW, Place, close, equal, greedy, guest
from torch import Tensor, nn

from gpt import GPT
from gpt.weights.adapters import LAYERS

if TYPE_CHECKING:
    from peft import PeftMixedModel, PeftModel


def greedy_by_forward(model: nn.Module, ids: list[int], number: int = NEW) -> list[int]:
    """Greedy ids by one whole forward pass per token."""
    ids = list(ids)
    with torch.no_grad():
        for _ in range(number):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[-number:]


def add_lora(model: GPT) -> "PeftModel | PeftMixedModel":
    """peft's adapters with random weights."""
    import peft

    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=list(LAYERS)))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    return adapted.eval()


@guest("peft")
def peft_adapters(place: Place) -> None:
    """LoRA adapters count in `generate`, and merge"""
    model = place.model
    adapted = add_lora(model)
    expected = greedy_by_forward(adapted, place.prompt)
    equal(greedy(model, place.prompt), expected)
    equal(greedy(adapted.merge_and_unload(), place.prompt), expected)


@guest("torchao")
def torchao_weights(place: Place) -> None:
    """int8 weights count in `generate`"""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = place.model
    quantize_(model, Int8WeightOnlyConfig())
    equal(greedy(model, place.prompt), greedy_by_forward(model, place.prompt))


def tokens_of(length: int) -> Tensor:
    """(1, length) ids."""
    return torch.randint(0, 2048, (1, length))


@guest("onnx", "onnxruntime", "onnxscript")
def onnx(place: Place) -> None:
    """export with a dynamic length, logits in onnxruntime"""
    import onnxruntime

    model, file = place.model, place.folder / "model.onnx"
    length = torch.export.Dim("length", min=2, max=128)
    torch.onnx.export(
        model, (tokens_of(16),), file, dynamo=True, dynamic_shapes=({1: length},), verbose=False
    )
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for size in (16, 40):
        tokens = tokens_of(size)
        theirs = session.run(None, {session.get_inputs()[0].name: tokens.numpy()})[0]
        with torch.no_grad():
            close(model(tokens), torch.from_numpy(theirs), 1e-3)
