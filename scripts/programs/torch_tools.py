"""Programs that change, compile or export a PyTorch module."""

import copy
from collections.abc import Callable
from functools import partial

import torch
from programs.common import NEW, Guest, Place, close, equal, greedy
from torch import Tensor, nn

from gpt import GPT, MultiHeadAttention
from gpt.weights.adapters import LAYERS


def greedy_by_forward(model: nn.Module, ids: list[int], number: int = NEW) -> list[int]:
    """Greedy ids by one whole forward pass per token."""
    ids = list(ids)
    with torch.no_grad():
        for _ in range(number):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[-number:]


def decodes_as_changed(change: Callable[[GPT], nn.Module | None], place: Place) -> None:
    """`generate` must write what the changed model's forward says, and not what the unchanged one says."""
    model = place.model
    changed = change(model) or model
    expected = greedy_by_forward(changed, place.prompt)
    equal(greedy(model, place.prompt), expected)


def add_lora(model: GPT) -> nn.Module:
    """peft's adapters with random weights."""
    import peft

    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=list(LAYERS)))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    return adapted.eval()


def peft_adapters(place: Place) -> None:
    """Adapters count in generation, and merged they give the same text."""
    decodes_as_changed(add_lora, place)
    model = place.model
    adapted = add_lora(model)
    expected = greedy_by_forward(adapted, place.prompt)
    merged = adapted.merge_and_unload()
    equal(greedy(merged, place.prompt), expected)


def quantize_with_torchao(model: GPT) -> None:
    """Int8 weights."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def tokens_of(length: int) -> Tensor:
    """(1, length) ids."""
    return torch.randint(0, 2048, (1, length))


def compiled(place: Place) -> None:
    """One graph for several sequence lengths, for the attention module and for the model."""
    attention = MultiHeadAttention(64, 64, 128, 0.0, 4, qkv_bias=True).eval()
    for module, inputs in (
        (attention, [torch.randn(2, length, 64) for length in (16, 33, 64)]),
        (place.model, [tokens_of(length) for length in (16, 33, 64)]),
    ):
        fast = torch.compile(copy.deepcopy(module), fullgraph=True)
        with torch.no_grad():
            for one in inputs:
                close(module(one), fast(one))


def exported(place: Place) -> None:
    """torch.export with a dynamic length."""
    model, length = place.model, torch.export.Dim("length", min=2, max=128)
    program = torch.export.export(model, (tokens_of(16),), dynamic_shapes=({1: length},))
    with torch.no_grad():
        for size in (5, 16, 100):
            tokens = tokens_of(size)
            close(model(tokens), program.module()(tokens))


def packaged(place: Place) -> None:
    """An AOTInductor package runs without Python."""
    model = place.model
    with torch.no_grad():
        program = torch.export.export(model, (tokens_of(32),))
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(place.folder / "model.pt2")
        )
        tokens = tokens_of(32)
        close(model(tokens), torch._inductor.aoti_load_package(package)(tokens))


def onnx(place: Place) -> None:
    """ONNX, run by onnxruntime."""
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


def per_sample_gradients(place: Place) -> None:
    """vmap(grad) of torch.func equals a loop over the samples."""
    from torch.func import functional_call, grad, vmap

    model, tokens = place.model, torch.randint(0, 2048, (3, 12))
    parameters = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        logits = functional_call(model, weights, (row[None, :-1],))
        return nn.functional.cross_entropy(logits[0], row[1:])

    together = vmap(grad(loss), in_dims=(None, 0))(parameters, tokens)
    for i, row in enumerate(tokens):
        for name, gradient in grad(loss)(parameters, row).items():
            close(gradient, together[name][i])


GUESTS = (
    Guest(
        "peft", "LoRA adapters count in `generate`, and merge", ("peft",), ("peft",), peft_adapters
    ),
    Guest(
        "torchao", "int8 weights count in `generate`", ("torchao",), ("torchao",),
        partial(decodes_as_changed, quantize_with_torchao),
    ),
    Guest(
        "torch", "torch.compile(fullgraph=True), three lengths: attention, model", ("torch",), (), compiled,
    ),
    Guest("torch", "torch.export with a dynamic length", ("torch",), (), exported),
    Guest("torch", "AOTInductor package", ("torch",), (), packaged),
    Guest("torch", "vmap(grad) over the model", ("torch",), (), per_sample_gradients),
    Guest(
        "ONNX", "export with a dynamic length, logits in onnxruntime", ("onnx", "onnxruntime"),
        ("onnx", "onnxruntime", "onnxscript"), onnx,
    ),
)  # fmt: skip
