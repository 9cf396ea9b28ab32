"""Small files that claim to be large, or hold something else: one line, quickly, in little memory."""

import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from other_programs import book_state, huggingface_model, nanogpt_checkpoint
from rewritten import rewritten
from safetensors.torch import save_file
from tiny_runs import fit

from gpt import GPT, GPTConfig
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
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.fixture
def refused(tmp_path):
    """Check that a path is refused in one line and within 100 MB."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("reads the peak memory from Linux")

    def check(path: Path, match: str | None = None) -> None:
        Path("/proc/self/clear_refs").write_text("5", "utf-8")  # the peak is the current memory
        before = peak_bytes()
        with pytest.raises(InputError, match=match) as raised:
            GPT.from_pretrained(path)
        assert "\n" not in str(raised.value)
        assert peak_bytes() - before < 100e6

    return check


def safetensors(path: Path, header: dict | bytes, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def folder(path: Path, config: dict | str) -> Path:
    path.mkdir(exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (path / "config.json").write_text(text, "utf-8")
    safetensors(path / "model.safetensors", {})
    return path


CONFIGURATIONS = {
    "many layers": {**GPT2, "n_layer": HUGE},
    "no heads": {**GPT2, "n_head": 0},
    "true": {**GPT2, "n_layer": True},
    "400 digits": {**GPT2, "n_layer": 10**400},
    "no number": {**GPT2, "n_layer": float("nan")},
    "a huge model of this program": {**OWN, "context_length": HUGE, "vocab_size": HUGE, "emb_dim": HUGE},
    "nested lists": "[" * 100_000,
    "a long number": "1" * 10_000,
    "a list": "[]",
}


@pytest.mark.parametrize("config", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_a_configuration_that_claims_a_huge_model_or_wrong_types(config, refused, tmp_path):
    refused(folder(tmp_path / "weights", config))


def test_a_mask_that_is_larger_than_the_weights(refused, tmp_path):
    """A hundred thousand positions of width one are 400 kB; their mask would be 10 GB."""
    small = GPTConfig(vocab_size=300, context_length=1, emb_dim=1, num_heads=1, num_layers=1)
    state = {**GPT(small).state_dict(), "position_embedding.weight": torch.zeros(100_000, 1)}
    del state["head.weight"]
    config = {**OWN, **small.to_dict(), "context_length": 100_000}
    save_file(state, folder(tmp_path, config) / "model.safetensors")
    refused(tmp_path, "mask")


def test_a_checkpoint_whose_mask_is_larger_than_its_weights(workplace, refusal):
    """200 KB that would take 20 times 900 MB, wherever they are read."""
    assert fit("--run", "mine", "--trainer.max_steps", "1", "--model.config.num_layers", "20") == 0
    folder = Path("runs/mine/checkpoints")
    config = {**read(folder / "last.safetensors").model.config, "context_length": 30_000}
    positions = {"position_embedding.weight": torch.zeros(30_000, 32)}
    path = folder / "step-1.safetensors"
    rewritten(folder / "last.safetensors", path, model={"config": config}, tensors=positions)
    for command in ("fit --resume", "validate --ckpt_path", "generate --checkpoint"):
        error = refusal(f"{command} {path}")
        assert "context_length 30000 needs a mask larger than the weights" in error


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


def test_a_matrix_of_which_all_elements_are_one_number(refused, tmp_path):
    """A stride of 0 makes 2^28 rows of four bytes."""
    saved = nanogpt_checkpoint(huggingface_model())
    saved["model"]["transformer.wte.weight"] = torch.zeros(1).expand(HUGE, 48)
    saved["model_args"]["vocab_size"] = HUGE
    torch.save(saved, tmp_path / "ckpt.pt")
    refused(tmp_path, "its tensors are larger than the file")


def rewritten_archive(path: Path, pickle: Callable[[bytes], bytes | None]) -> Path:
    """The archive of torch.save with other bytes as its pickle, compressed; none with None."""
    torch.save(book_state(huggingface_model()), path)
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in members.items():
            kept = pickle(data) if name.endswith("data.pkl") else data
            if kept is not None:
                new.writestr(name, kept)
    return path


def huge_pickle(path: Path) -> None:
    """It is compressed to a thousandth."""
    rewritten_archive(path, lambda _: b"(" * 150_000_000)


def no_pickle(path: Path) -> None:
    rewritten_archive(path, lambda _: None)


def claimed_size(path: Path) -> None:
    data = bytearray(rewritten_archive(path, lambda data: data).read_bytes())
    struct.pack_into("<I", data, data.index(b"PK\x01\x02") + 24, 0xFFFFFFF0)  # in the central directory
    path.write_bytes(data)


def claimed_storage(path: Path) -> None:
    """The format is the older one."""
    buffer = io.BytesIO()
    torch.save({"tok_emb.weight": torch.zeros(7)}, buffer, _use_new_zipfile_serialization=False)
    path.write_bytes(buffer.getvalue().replace(b"K\x07", b"\x8a\x08" + struct.pack("<q", 10**13)))


@pytest.mark.parametrize("write", [huge_pickle, no_pickle, claimed_size, claimed_storage])
def test_a_pickle_file_that_lies(write, refused, tmp_path):
    write(tmp_path / "model.pth")
    refused(tmp_path / "model.pth", "not a file of tensors")


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


@pytest.mark.parametrize(
    "command",
    [
        "import",
        "export --checkpoint",
        "generate --checkpoint",
        "serve --checkpoint",
        "evaluate --data text.txt --checkpoint",
        "fit --data.corpus text.txt --model.init_from",
    ],
)
def test_the_commands_print_one_line_and_write_nothing(command, workplace, refusal):
    folder(workplace / "huge", {**GPT2, "n_layer": HUGE})
    before = sorted(workplace.rglob("*"))
    assert "huge: num_layers must be at most 10000" in refusal(f"{command} huge")
    assert sorted(workplace.rglob("*")) == before


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
