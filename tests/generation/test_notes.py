"""A model's test is noted: who finds the note compares no more than a tiny model, and whoever cannot, all."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gpt import GPT, GPTConfig
from gpt.attention import kernels, multi_head
from gpt.generation import build, decoding, notes
from gpt.generation.compiled import Compiled
from gpt.generation.decoding import backend_for, backend_of
from gpt.generation.forward import Forward
from tests.generation.conftest import sharp
from tests.generation.test_changed_models import CHANGES, CHANGES_WITHOUT_CACHE

CONFIG = GPTConfig(vocab_size=301, context_length=32, emb_dim=64, num_heads=4, num_layers=2)


@pytest.fixture(autouse=True)
def _own_cache(cache_with_program, monkeypatch, tmp_path):
    """A cache with the program and without notes."""
    (program,) = Path(cache_with_program).glob("compiled/*.so")
    folder = tmp_path / "cache" / "compiled"
    folder.mkdir(mode=0o700, parents=True)
    shutil.copyfile(program, folder / program.name)
    monkeypatch.setenv("GPT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def compared(monkeypatch) -> list[GPT]:
    """The models that were compared."""
    models, test = [], decoding._test

    def recording(model, program, rounding):
        models.append(model)
        return test(model, program, rounding)

    monkeypatch.setattr(decoding, "_test", recording)
    return models


def kept() -> list[str]:
    """The lines of the notes."""
    path = build.program_path().with_suffix(".passed")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
def test_weights_are_compared_once(precision, compared):
    name = backend_for(precision)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    first, second = sharp(CONFIG).to(dtype), sharp(CONFIG).to(dtype)
    assert isinstance(backend_of(first, name), Compiled)
    assert compared == [first]
    (note,) = kept()
    before = torch.get_rng_state()
    backend = backend_of(second, name)
    assert isinstance(backend, Compiled) and backend.rounding == (None if name == "auto" else name)
    assert compared == [first] and kept() == [note]
    assert torch.equal(torch.get_rng_state(), before)


def test_each_rounding_is_compared(compared):
    for name in ("auto", "int8", "int4"):
        backend_of(sharp(CONFIG), name)
    assert len(compared) == len(kept()) == 3


def test_another_process_compares_no_more():
    backend_of(sharp(CONFIG))
    program = """
import torch
from gpt.generation import decoding
from tests.generation.conftest import sharp
from tests.generation.test_notes import CONFIG

torch.set_num_threads(1)
decoding._test = None
print(type(decoding.backend_of(sharp(CONFIG))).__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=False)
    assert done.stdout == "Compiled\n", done.stderr


def set_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def rebuild(monkeypatch):
    with build.program_path().open("ab") as file:
        file.write(b"\0")


OTHERS = [
    pytest.param(set_threads, id="threads"),
    pytest.param(rebuild, id="a program"),
    pytest.param(lambda patch: patch.setattr(torch, "__version__", "0"), id="a version of torch"),
    pytest.param(lambda patch: torch.set_float32_matmul_precision("high"), id="a precision of products"),
]


@pytest.mark.parametrize("change", OTHERS)
def test_with_another_of_these_it_is_compared_again(change, compared, monkeypatch):
    backend_of(sharp(CONFIG))
    precision = torch.get_float32_matmul_precision()
    change(monkeypatch)
    backend_of(sharp(CONFIG))
    torch.set_float32_matmul_precision(precision)
    assert len(compared) == len(kept()) == 2


def one_bit(model):
    model.blocks[1].feed_forward.down.weight.data[-1, -1] *= 1 + 2**-23


def other_mask(model):
    for block in model.blocks:
        block.attention.mask = model.blocks[0].attention.mask.clone()  # each block its own


def exchanged(model):
    first, last = model.blocks
    first.attention.W_key, last.attention.W_key = last.attention.W_key, first.attention.W_key


def untied(model):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


@pytest.mark.parametrize("change", [one_bit, other_mask, exchanged, untied])
def test_another_model_is_compared(change, compared):
    backend_of(sharp(CONFIG))
    model = sharp(CONFIG)
    change(model)
    assert isinstance(backend_of(model), Compiled)
    assert len(compared) == len(kept()) == 2


@pytest.fixture
def package(monkeypatch, tmp_path) -> Path:
    """Stands for the package's source."""
    (tmp_path / "package" / "attention").mkdir(parents=True)
    monkeypatch.setattr(notes, "_PACKAGE", tmp_path / "package")
    monkeypatch.setattr(notes, "_LOADED", float("inf"))
    return tmp_path / "package"


def test_edited_source_is_compared_again(package, compared):
    for source in ("a = 1", "a = 2"):
        for _ in range(2):
            (package / "attention" / "kernels.py").write_text(source, encoding="utf-8")
            backend_of(sharp(CONFIG))
    assert len(compared) == len(kept()) == 2


def test_source_that_is_newer_than_the_process_is_not_what_it_runs(package, compared, monkeypatch):
    monkeypatch.setattr(notes, "_LOADED", 0.0)
    (package / "model.py").write_text("a = 1", encoding="utf-8")
    for _ in range(2):
        assert isinstance(backend_of(sharp(CONFIG)), Compiled)
    assert len(compared) == 2 and not kept()


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"0" * 64, b"short\n", "cut"])
def test_a_damaged_note_is_ignored(content, compared):
    backend_of(sharp(CONFIG))
    path, (note,) = build.program_path().with_suffix(".passed"), kept()
    path.write_bytes(note[:40].encode() if content == "cut" else content)
    backend_of(sharp(CONFIG))
    assert len(compared) == 2 and kept()[-1] == note and {len(line) for line in kept()} == {64}
    backend_of(sharp(CONFIG))
    assert len(compared) == 2


def test_a_link_and_a_folder_are_no_notes(tmp_path, compared):
    backend_of(sharp(CONFIG))
    path = build.program_path().with_suffix(".passed")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    backend_of(sharp(CONFIG))
    path.unlink()
    path.mkdir()
    assert isinstance(backend_of(sharp(CONFIG)), Compiled)
    assert len(compared) == 3


def test_where_nothing_can_be_written_each_process_compares(compared, monkeypatch, capsys):
    def full(path):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(notes, "atomic_write", full)
    for _ in range(2):
        assert isinstance(backend_of(sharp(CONFIG)), Compiled)
    assert len(compared) == 2 and not kept()
    assert capsys.readouterr().err == ""


def test_weights_that_change_in_a_process_leave_no_notes(compared):
    """As in training, where they do not come twice."""
    model = sharp(CONFIG)
    for _ in range(3):
        backend_of(model)
        with torch.no_grad():
            model.head.weight.mul_(0.9)
    assert len(compared) == 3 and len(kept()) == 1


def test_only_the_newest_notes_are_kept(monkeypatch):
    monkeypatch.setattr(notes, "_MOST", 2)
    for seed in range(3):
        backend_of(sharp(CONFIG, seed))
    newest = kept()
    backend_of(sharp(CONFIG, 2))
    assert len(newest) == 2 and kept() == newest


@pytest.mark.parametrize("change", [*CHANGES, *CHANGES_WITHOUT_CACHE])
def test_a_changed_model_does_not_find_the_note(change):
    backend_of(sharp(CONFIG))
    model = sharp(CONFIG)
    change(model)
    assert isinstance(backend_of(model.eval()), Forward)
    assert len(kept()) == 1


def capped(monkeypatch):
    def forward(self, tokens, original=GPT.forward, **options):
        return 5 * torch.tanh(original(self, tokens, **options) / 5)

    monkeypatch.setattr(GPT, "forward", forward)


def without_late_tokens(monkeypatch):
    """No tiny model has such."""

    def forward(self, tokens, original=GPT.forward, **options):
        logits = original(self, tokens, **options)
        logits[..., 200:] = 0
        return logits

    monkeypatch.setattr(GPT, "forward", forward)


def in_a_file_beside_the_package(monkeypatch):
    """Whose path begins like the package's."""
    without_late_tokens(monkeypatch)
    code = GPT.forward.__code__.replace(co_filename=f"{notes._PACKAGE}_mine.py")
    monkeypatch.setattr(GPT.forward, "__code__", code)


def another_layer(monkeypatch):
    monkeypatch.setattr(nn.GELU, "forward", lambda self, x: x.relu())


def another_kernel(monkeypatch):
    """For texts that are longer than those of a tiny model."""
    attend = nn.functional.scaled_dot_product_attention

    def doubled(query, *others, **options):
        return attend(query * 2 if query.shape[2] > 17 else query, *others, **options)

    monkeypatch.setattr("gpt.attention.kernels.F.scaled_dot_product_attention", doubled)


def a_replaced_object(monkeypatch):
    """Also for longer texts."""
    attention = multi_head.attention

    class Attention:
        def __call__(self, query, key, value, *others):
            return kernels.Attended(value) if query.shape[2] > 17 else attention(query, key, value, *others)

    monkeypatch.setattr(multi_head, "attention", Attention())


def inside_torch(monkeypatch):
    original = torch.embedding
    monkeypatch.setattr(torch, "embedding", lambda *arguments: 2 * original(*arguments))


PATCHES = [
    capped,
    without_late_tokens,
    in_a_file_beside_the_package,
    another_layer,
    another_kernel,
    a_replaced_object,
    inside_torch,
]


@pytest.mark.parametrize("patch", PATCHES)
def test_patched_code_counts_after_a_note(patch, monkeypatch):
    backend_of(sharp(CONFIG))
    patch(monkeypatch)
    assert isinstance(backend_of(sharp(CONFIG)), Forward)


def test_a_hook_of_all_modules_counts_after_a_note():
    backend_of(sharp(CONFIG))
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, _, out: out * 2 if isinstance(module, nn.LayerNorm) and len(out[0]) > 17 else None
    )
    with hook:
        assert isinstance(backend_of(sharp(CONFIG)), Forward)


def test_autocast_counts_after_a_note():
    backend_of(sharp(CONFIG))
    with torch.autocast("cpu", torch.bfloat16):
        assert isinstance(backend_of(sharp(CONFIG)), Forward)


SHAPES = [{}, {"num_heads": 1}, {"qkv_bias": False, "exact_gelu": True}, {"tie_embeddings": False}]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_tiny_model_of_any_shape_is_computed(shape):
    model = GPT(GPTConfig(**{"vocab_size": 50, "emb_dim": 96, "num_heads": 6, "num_layers": 1, **shape}))
    with torch.inference_mode():
        assert decoding._computes_tiny(model, build.program())


def hashes(values: bytes) -> list[int]:
    """By the program, of bytes that begin anywhere."""
    tensor = torch.frombuffer(bytearray(b"_" + values), dtype=torch.uint8)[1:]
    return list(notes._hashes([tensor], build.program()))


def test_the_hash_is_its_formula():
    """Written out."""
    values = bytes(torch.randint(256, (64 * 5 + 13,), dtype=torch.uint8))
    padded = values + bytes(64 - 13)
    expected = list(range(1, 9))
    for i in range(0, len(padded), 8):
        lane = i // 8 % 8
        mixed = (
            (expected[lane] ^ int.from_bytes(padded[i : i + 8], sys.byteorder)) * 0x9E3779B97F4A7C15 % 2**64
        )
        expected[lane] = (mixed << 31 | mixed >> 33) % 2**64
    assert hashes(values) == expected


@pytest.mark.parametrize("size", [1, 63, 64, 65, 256 + 64, 3 * 256 + 5])
def test_each_bit_counts(size, monkeypatch):
    """Also two bits that are the signs of numbers beside each other; with any number of threads."""
    monkeypatch.setattr(notes, "_PIECE", 256)
    values = bytearray(bytes(torch.randint(256, (size,), dtype=torch.uint8)))
    before = hashes(values)
    assert len(before) == -(-size // 256) * 8
    for place in {0, size // 2, size - 1, max(0, size - 8)}:
        for places in ([place], [place, place - 64], [place, place - 8]):
            if min(places) < 0:
                continue
            for bit in (1, 128):
                changed = bytearray(values)
                for each in places:
                    changed[each] ^= bit
                assert hashes(changed) != before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert hashes(values) == before
