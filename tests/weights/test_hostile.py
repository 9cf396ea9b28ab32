"""Small files that claim to be large, or hold something else: one line, quickly, in little memory."""

import io
import json
import struct
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from other_programs import book_state, huggingface_model, nanogpt_checkpoint
from safetensors.torch import save_file
from tiny_runs import fit

from gpt import GPT, GPTConfig
from gpt.cli import main
from gpt.errors import InputError
from gpt.weights.checkpoint import read, write

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
    """Check that a path is refused in one line, within 5 seconds of computing and 100 MB."""

    def check(path: Path, match: str | None = None) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is the current memory
        before, start = peak_bytes(), time.process_time()
        with pytest.raises(InputError, match=match) as raised:
            GPT.from_pretrained(path)
        assert "\n" not in str(raised.value)
        assert time.process_time() - start < 5
        assert peak_bytes() - before < 100e6

    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("reads the peak memory from Linux")
    return check


def safetensors(path: Path, header: dict | bytes, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def folder(path: Path, config: dict) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    safetensors(path / "model.safetensors", {})
    return path


CONFIGURATIONS = {
    "many layers": {**GPT2, "n_layer": HUGE},
    "many tokens": {**GPT2, "vocab_size": HUGE},
    "no heads": {**GPT2, "n_head": 0},
    "a text": {**GPT2, "n_layer": "3"},
    "true": {**GPT2, "n_layer": True},
    "a list": {**GPT2, "n_layer": [2]},
    "400 digits": {**GPT2, "n_layer": 10**400},
    "no number": {**GPT2, "n_layer": float("nan")},
    "a huge model of this program": {**OWN, "context_length": HUGE, "vocab_size": HUGE, "emb_dim": HUGE},
}


@pytest.mark.parametrize("config", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_a_configuration_that_claims_a_huge_model_or_wrong_types(config, refused, tmp_path):
    refused(folder(tmp_path / "weights", config))


NO_CONFIGURATIONS = {
    "nested lists": "[" * 100_000,
    "nested mappings": '{"a":' * 100_000,
    "a long number": "1" * 10_000,
    "a list": "[]",
    "another mapping": '{"n_heads": 1}',
}


@pytest.mark.parametrize("text", NO_CONFIGURATIONS.values(), ids=NO_CONFIGURATIONS)
def test_a_configuration_that_is_no_mapping(text, refused, tmp_path):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    refused(tmp_path)


def test_a_mask_that_is_larger_than_the_weights(refused, tmp_path):
    """A hundred thousand positions of width one are 400 kB; their mask would be 10 GB."""
    small = GPTConfig(vocab_size=300, context_length=1, emb_dim=1, num_heads=1, num_layers=1)
    state = {**GPT(small).state_dict(), "position_embedding.weight": torch.zeros(100_000, 1)}
    del state["head.weight"]
    config = {**OWN, **small.to_dict(), "context_length": 100_000}
    save_file(state, folder(tmp_path, config) / "model.safetensors")
    refused(tmp_path, "mask")


@pytest.mark.parametrize(
    "command", [("fit", "--resume"), ("validate", "--ckpt_path"), ("generate", "--checkpoint")]
)
def test_a_checkpoint_whose_mask_is_larger_than_its_weights(command, workplace, capsys):
    """200 KB that would take 20 times 900 MB, wherever they are read."""
    assert fit("--run", "mine", "--trainer.max_steps", "1", "--model.config.num_layers", "20") == 0
    saved = read("runs/mine/checkpoints/last.safetensors")
    path = Path("runs/mine/checkpoints/step-1.safetensors")
    tensors = {**saved.tensors, "position_embedding.weight": torch.zeros(30_000, 32)}
    part = replace(saved.model, config={**saved.model.config, "context_length": 30_000})
    with path.open("wb") as file:
        write(file, tensors, part, saved.run)
    capsys.readouterr()
    assert main([*command, str(path)]) == 2
    assert "context_length 30000 needs a mask larger than the weights" in capsys.readouterr().err


LYING_HEADERS = {
    "longer than the file": ({}, 1 << 62),
    "nested lists": (b"[" * 100_000, None),
    "a huge tensor": ({"wte.weight": {"dtype": "F32", "shape": [HUGE, HUGE], "data_offsets": [0, 4]}}, None),
}


@pytest.mark.parametrize(("header", "length"), LYING_HEADERS.values(), ids=LYING_HEADERS)
def test_a_safetensors_header_that_lies(header, length, refused, tmp_path):
    safetensors(folder(tmp_path, GPT2) / "model.safetensors", header, b"\0" * 4, length)
    refused(tmp_path)


FUNCTIONS = [
    (bytearray, 5 * 10**8),
    (torch.FloatTensor, 10**4, 10**4),
    (torch.storage.UntypedStorage, 5 * 10**8),
    (torch._utils._rebuild_meta_tensor_no_storage, torch.float32, (HUGE, HUGE), (1, 1), False),
]


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("call", FUNCTIONS, ids=lambda call: call[0].__name__)
def test_a_pickle_that_calls_what_allocates(call, legacy, refused, tmp_path):
    content = {"tok_emb.weight": Call(*call)}
    torch.save(content, tmp_path / "model.pth", _use_new_zipfile_serialization=not legacy)
    refused(tmp_path / "model.pth", "not a file of tensors")


def test_a_legacy_pickle_whose_storage_claims_more_than_the_file(refused, tmp_path):
    buffer = io.BytesIO()
    torch.save({"tok_emb.weight": torch.zeros(7)}, buffer, _use_new_zipfile_serialization=False)
    claimed = buffer.getvalue().replace(b"K\x07", b"\x8a\x08" + struct.pack("<q", 10**13))
    (tmp_path / "model.pth").write_bytes(claimed)
    refused(tmp_path / "model.pth", "not a file of tensors")


def test_a_matrix_of_which_all_elements_are_one_number(refused, tmp_path):
    """A stride of 0 makes 2^28 rows of four bytes."""
    saved = nanogpt_checkpoint(huggingface_model())
    saved["model"]["transformer.wte.weight"] = torch.zeros(1).expand(HUGE, 48)
    saved["model_args"]["vocab_size"] = HUGE
    torch.save(saved, tmp_path / "ckpt.pt")
    refused(tmp_path, "its tensors are larger than the file")


def test_a_thousand_layers_that_are_one(refused, tmp_path):
    saved = nanogpt_checkpoint(huggingface_model())
    block = {name: tensor for name, tensor in saved["model"].items() if ".h.0." in name}
    for layer in range(1000):
        saved["model"] |= {name.replace(".0.", f".{layer}."): tensor for name, tensor in block.items()}
    saved["model_args"]["n_layer"] = 1000
    torch.save(saved, tmp_path / "ckpt.pt")
    refused(tmp_path, "its tensors are larger than the file")


def members(path: Path) -> dict[str, bytes]:
    """The files of an archive that torch.save writes."""
    torch.save(book_state(huggingface_model()), path)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_archive(path: Path, contents: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in contents.items():
            archive.writestr(name, data)


def test_an_archive_whose_pickle_is_compressed_to_a_thousandth(refused, tmp_path):
    file = tmp_path / "model.pth"
    contents = {
        name: b"(" * 150_000_000 if name.endswith("data.pkl") else data
        for name, data in members(file).items()
    }
    write_archive(file, contents, zipfile.ZIP_DEFLATED)
    refused(file, "not a file of tensors")


def test_an_archive_without_a_pickle(refused, tmp_path):
    file = tmp_path / "model.pth"
    contents = {name: data for name, data in members(file).items() if not name.endswith("data.pkl")}
    write_archive(file, contents)
    refused(file, "not a file of tensors")


def test_an_archive_that_claims_a_size(refused, tmp_path):
    file = tmp_path / "model.pth"
    write_archive(file, members(file))
    data = bytearray(file.read_bytes())
    size_of_first = data.index(b"PK\x01\x02") + 24  # in the central directory
    data[size_of_first : size_of_first + 4] = struct.pack("<I", 0xFFFFFFF0)
    file.write_bytes(data)
    refused(file, "not a file of tensors")


WRONG_CONTENTS = {
    "many layers": {"model": {}, "model_args": {**GPT2, "block_size": 24, "n_layer": HUGE}},
    "sparse": {"tok_emb.weight": torch.zeros(3, 4), "pos_emb.weight": torch.zeros(3, 4).to_sparse()},
    "whole numbers": {
        "tok_emb.weight": torch.zeros(3, 768, dtype=torch.int64),
        "pos_emb.weight": torch.zeros(3, 768),
    },
    "no names": {1: torch.zeros(3)},
}


@pytest.mark.parametrize("saved", WRONG_CONTENTS.values(), ids=WRONG_CONTENTS)
def test_a_checkpoint_of_the_wrong_content(saved, refused, tmp_path):
    torch.save(saved, tmp_path / "weights.pt")
    refused(tmp_path / "weights.pt")


def test_the_commands_print_one_line_and_write_nothing(tmp_path, monkeypatch, text_file, capsys):
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "huge", {**GPT2, "n_layer": HUGE})
    before = sorted(tmp_path.rglob("*"))
    for command in (
        ["import", "huge"],
        ["export", "--checkpoint", "huge"],
        ["generate", "--checkpoint", "huge"],
        ["serve", "--checkpoint", "huge"],
        ["evaluate", "--checkpoint", "huge", "--data", str(text_file)],
        ["fit", "--model.init_from", "huge", "--data.corpus", str(text_file)],
    ):
        assert main(command) == 2, command
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "huge: num_layers must be at most 10000" in error
    assert sorted(tmp_path.rglob("*")) == before


def test_weights_come_without_drawing_random_numbers(model, tmp_path):
    """The model is built without memory, so a large one is not initialised in vain."""
    model.save_pretrained(tmp_path)
    torch.manual_seed(1)
    loaded = GPT.from_pretrained(tmp_path)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), drawn)
    assert loaded.head.weight is loaded.token_embedding.weight
    assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))
    assert len({block.attention.mask.data_ptr() for block in loaded.blocks}) == 1
