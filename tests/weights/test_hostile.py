"""Small files that claim to be large, or hold something else: one line, quickly, in little memory."""

import io
import json
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from other_programs import huggingface_model, nanogpt_checkpoint
from rewritten import rewritten
from tiny_runs import fit

from gpt import GPT
from gpt.cli import main
from gpt.errors import InputError
from gpt.weights.checkpoint import read

pytestmark = pytest.mark.timeout(60)  # each takes less than a second, and would take hours or forever

HUGE = 1 << 28
GPT2 = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 24, "n_embd": 48, "n_head": 3, "n_layer": 2}
OWN = {"model_type": "minimal-gpt", "vocab_size": 300, "context_length": 16, "emb_dim": 32, "num_heads": 4}


class Call:
    """Pickled as a call of a function that torch's restricted unpickler allows."""

    def __init__(self, function, *arguments) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.fixture
def refused(tmp_path):
    """Check that a path is refused in one line and within 100 MB."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("reads the peak memory from Linux")

    def check(path: Path, match: str | None = None) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is the current memory
        before = peak_bytes()
        with pytest.raises(InputError, match=match) as raised:
            GPT.from_pretrained(path)
        assert "\n" not in str(raised.value)
        assert peak_bytes() - before < 100e6

    return check


def safetensors(path: Path, header: dict | bytes, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def folder(path: Path, config: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config, encoding="utf-8")
    safetensors(path / "model.safetensors", {})
    return path


CONFIGURATIONS = {
    "many layers": json.dumps({**GPT2, "n_layer": HUGE}),
    "400 digits": json.dumps({**GPT2, "n_layer": 10**400}),
    "no number": json.dumps({**GPT2, "n_layer": float("nan")}),
    "a huge model": json.dumps({**OWN, "context_length": HUGE, "vocab_size": HUGE, "emb_dim": HUGE}),
    "nested lists": "[" * 100_000,
    "a list": "[]",
    "no model": "{}",
}


@pytest.mark.parametrize("text", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_a_configuration_that_claims_a_huge_model_or_wrong_types(text, refused, tmp_path):
    refused(folder(tmp_path / "weights", text))


def test_a_checkpoint_whose_mask_is_larger_than_its_weights(workplace, capsys):
    """200 KB that would take 20 times 900 MB, wherever they are read."""
    assert fit("--run", "mine", "--trainer.max_steps", "1", "--model.config.num_layers", "20") == 0
    folder = Path("runs/mine/checkpoints")
    config = {**read(folder / "last.safetensors").model.config, "context_length": 30_000}
    positions = {"position_embedding.weight": torch.zeros(30_000, 32)}
    path = folder / "step-1.safetensors"
    rewritten(folder / "last.safetensors", path, model={"config": config}, tensors=positions)
    capsys.readouterr()
    for command in (["fit", "--resume"], ["validate", "--ckpt_path"], ["generate", "--checkpoint"]):
        assert main([*command, str(path)]) == 2
        assert "context_length 30000 needs a mask larger than the weights" in capsys.readouterr().err


STRANGE_VALUES = [None, "gpt2", [], {}, True, -1, 1.5, 1e300, 10**400]


@pytest.mark.parametrize("value", STRANGE_VALUES, ids=lambda value: f"{value!r:.8}")
def test_a_setting_of_another_type_is_one_line_for_each_format(value, tmp_path):
    """Each file holds no tensor, so that it is refused at the latest for these."""
    for name, settings in (("gpt2", GPT2), ("own", OWN)):
        for setting in settings:
            weights = folder(tmp_path / name, json.dumps({**settings, setting: value}))
            with pytest.raises(InputError, match=r"^[^\n]*$"):
                GPT.from_pretrained(weights)
    saved = nanogpt_checkpoint(huggingface_model())
    for setting in saved["model_args"]:
        arguments = {**saved["model_args"], setting: value}
        torch.save({"model": {}, "model_args": arguments}, tmp_path / "ckpt.pt")
        with pytest.raises(InputError, match=r"^[^\n]*$"):
            GPT.from_pretrained(tmp_path / "ckpt.pt")
    book = {"tok_emb.weight": torch.zeros(300, 48), "pos_emb.weight": torch.zeros(16, 48)}
    (tmp_path / "book").mkdir()
    torch.save(book, tmp_path / "book" / "model.pth")
    for setting in ("n_heads", "drop_rate"):
        text = json.dumps({"n_heads": 4, setting: value})
        (tmp_path / "book" / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=r"^[^\n]*$"):
            GPT.from_pretrained(tmp_path / "book" / "model.pth")


LYING_HEADERS = {
    "longer than the file": ({}, 1 << 62),
    "nested lists": (b"[" * 100_000, None),
    "a huge tensor": ({"wte.weight": {"dtype": "F32", "shape": [HUGE, HUGE], "data_offsets": [0, 4]}}, None),
}


@pytest.mark.parametrize(("header", "length"), LYING_HEADERS.values(), ids=LYING_HEADERS)
def test_a_safetensors_header_that_lies(header, length, refused, tmp_path):
    safetensors(folder(tmp_path, json.dumps(GPT2)) / "model.safetensors", header, b"\0" * 4, length)
    refused(tmp_path)


FUNCTIONS = {
    "bytes": Call(bytearray, 5 * 10**8),
    "a tensor": Call(torch.FloatTensor, 10**4, 10**4),
    "a storage": Call(torch.storage.UntypedStorage, 5 * 10**8),
    "a tensor without a storage": Call(
        torch._utils._rebuild_meta_tensor_no_storage, torch.float32, (HUGE, HUGE), (1, 1), False
    ),
}


@pytest.mark.parametrize("call", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_pickle_that_calls_what_allocates(call, refused, tmp_path):
    torch.save({"tok_emb.weight": call}, tmp_path / "model.pth")
    refused(tmp_path / "model.pth", "not a file of tensors")


def test_a_legacy_pickle_whose_storage_claims_more_than_the_file(refused, tmp_path):
    buffer = io.BytesIO()
    torch.save({"tok_emb.weight": torch.zeros(7)}, buffer, _use_new_zipfile_serialization=False)
    claimed = buffer.getvalue().replace(b"K\x07", b"\x8a\x08" + struct.pack("<q", 10**13))
    (tmp_path / "model.pth").write_bytes(claimed)
    refused(tmp_path / "model.pth", "not a file of tensors")


def test_numbers_that_are_shared(refused, tmp_path):
    """A matrix of which all elements are one number: a stride of 0 makes 2^28 rows of four bytes.

    And a thousand layers that are one.
    """
    saved = nanogpt_checkpoint(huggingface_model())
    rows = {"transformer.wte.weight": torch.zeros(1).expand(HUGE, 48)}
    sizes = {**saved["model_args"], "vocab_size": HUGE}
    torch.save({"model": {**saved["model"], **rows}, "model_args": sizes}, tmp_path / "ckpt.pt")
    refused(tmp_path, "its tensors are larger than the file")
    block = {name: tensor for name, tensor in saved["model"].items() if ".h.0." in name}
    for layer in range(1000):
        saved["model"] |= {name.replace(".0.", f".{layer}."): tensor for name, tensor in block.items()}
    saved["model_args"]["n_layer"] = 1000
    torch.save(saved, tmp_path / "ckpt.pt")
    refused(tmp_path, "its tensors are larger than the file")


def test_an_archive_whose_pickle_is_compressed_to_a_thousandth(refused, tmp_path):
    with zipfile.ZipFile(tmp_path / "model.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"(" * 150_000_000)
    refused(tmp_path / "model.pth", "not a file of tensors")


@pytest.mark.parametrize(
    "command",
    [
        ["import"],
        ["export", "--checkpoint"],
        ["generate", "--checkpoint"],
        ["serve", "--checkpoint"],
        ["evaluate", "--data", "text.txt", "--checkpoint"],
        ["fit", "--data.corpus", "text.txt", "--model.init_from"],
    ],
    ids=lambda command: command[0],
)
def test_the_commands_print_one_line_and_write_nothing(command, workplace, capsys):
    folder(workplace / "huge", CONFIGURATIONS["many layers"])
    before = sorted(workplace.rglob("*"))
    assert main([*command, "huge"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "huge: num_layers must be at most 10000" in error
    assert sorted(workplace.rglob("*")) == before


def test_weights_come_without_drawing_random_numbers(model, tmp_path):
    """The model is built without memory, so a large one is not initialised in vain."""
    model.save_pretrained(tmp_path)
    before = torch.get_rng_state()
    loaded = GPT.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))
