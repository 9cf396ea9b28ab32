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
from gpt.generation.decoding import backend_of, for_decoding
from gpt.generation.forward import Forward
from tests.generation.conftest import sharp


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
    models, compare = [], decoding._compare

    def recording(model, program, rounding):
        models.append(model)
        return compare(model, program, rounding)

    monkeypatch.setattr(decoding, "_compare", recording)
    return models


@pytest.fixture
def file() -> Path:
    """The file of the notes, beside the program."""
    return build.program_path().with_suffix(".passed")


def kept(file: Path) -> list[str]:
    """The lines of the notes."""
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


SHAPES = {
    "bfloat16": {"num_heads": 1},
    "float32": {"num_heads": 6, "qkv_bias": False, "exact_gelu": True, "tie_embeddings": False},
    "int4": {"num_heads": 2},
}


@pytest.mark.parametrize(("precision", "shape"), SHAPES.items(), ids=SHAPES)
def test_weights_of_any_shape_are_compared_once(precision, shape, compared, file):
    config = GPTConfig(vocab_size=50, context_length=32, emb_dim=96, num_layers=1, **shape)
    first = for_decoding(sharp(config), precision)
    assert isinstance(backend_of(first), Compiled)
    before, notes_before = torch.get_rng_state(), kept(file)
    backend = backend_of(for_decoding(sharp(config), precision))
    assert isinstance(backend, Compiled) and backend.rounding == (precision if precision == "int4" else None)
    assert compared == [first] and kept(file) == notes_before
    assert torch.equal(torch.get_rng_state(), before)


def test_int8_and_int4_are_compared_each(compared, file):
    for precision in ("int8", "int4"):
        backend_of(for_decoding(sharp(), precision))
    assert len(compared) == len(kept(file)) == 2


def test_another_process_compares_no_more():
    backend_of(sharp())
    program = """
import torch
from gpt.generation import decoding
from tests.generation.conftest import sharp

torch.set_num_threads(1)
decoding._compare = None
print(type(decoding.backend_of(sharp())).__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=False)
    assert done.stdout == "Compiled\n", done.stderr


def rebuild(model, patch):
    with build.program_path().open("ab") as file:
        file.write(b"\0")


def one_bit(model, patch):
    model.blocks[1].feed_forward.down.weight.data[-1, -1] *= 1 + 2**-23


def exchanged(model, patch):
    first, last = model.blocks
    first.attention.W_key, last.attention.W_key = last.attention.W_key, first.attention.W_key


def untied(model, patch):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


CHANGES = {
    "a rounding": lambda model, patch: for_decoding(model, "int8"),
    "threads": lambda model, patch: patch.setattr(torch, "get_num_threads", lambda: 2),
    "a program": rebuild,
    "a version of torch": lambda model, patch: patch.setattr(torch, "__version__", "0"),
    "a precision of products": lambda model, patch: torch.set_float32_matmul_precision("high"),
    "one bit of a weight": one_bit,
    "an order of the weights": exchanged,
    "a head": untied,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_with_another_of_these_it_is_compared_again(change, compared, file, monkeypatch):
    backend_of(sharp())
    precision = torch.get_float32_matmul_precision()
    model = sharp()
    change(model, monkeypatch)
    assert isinstance(backend_of(model), Compiled)
    torch.set_float32_matmul_precision(precision)
    assert len(compared) == len(kept(file)) == 2


@pytest.fixture
def source(monkeypatch, tmp_path) -> Path:
    """Stands for a file of the package's source."""
    (tmp_path / "package" / "attention").mkdir(parents=True)
    monkeypatch.setattr(notes, "_PACKAGE", tmp_path / "package")
    return tmp_path / "package" / "attention" / "kernels.py"


def test_edited_source_is_compared_again(source, compared, file, monkeypatch):
    monkeypatch.setattr(notes, "_LOADED", float("inf"))
    for text in ("a = 1", "a = 2"):
        source.write_text(text, encoding="utf-8")
        backend_of(sharp())
        backend_of(sharp())
    assert len(compared) == len(kept(file)) == 2


def test_source_that_is_newer_than_the_process_is_not_what_it_runs(source, compared, file):
    source.write_text("a = 1", encoding="utf-8")
    for _ in range(2):
        assert isinstance(backend_of(sharp()), Compiled)
    assert len(compared) == 2 and not kept(file)


def test_a_damaged_note_a_link_and_a_folder_are_no_notes(tmp_path, compared, file):
    backend_of(sharp())
    (note,) = kept(file)
    for count, damaged in enumerate([note[:40].encode(), b"\xff" * 64], start=2):
        file.write_bytes(damaged)
        for _ in range(2):
            backend_of(sharp())
        assert (
            len(compared) == count and kept(file)[-1] == note and {len(line) for line in kept(file)} == {64}
        )
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    backend_of(sharp())
    file.unlink()
    file.mkdir()
    assert isinstance(backend_of(sharp()), Compiled)
    assert len(compared) == 5


def test_where_nothing_can_be_written_each_process_compares(compared, file, monkeypatch, capsys):
    def full(path):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(notes, "atomic_write", full)
    for _ in range(2):
        assert isinstance(backend_of(sharp()), Compiled)
    assert len(compared) == 2 and not kept(file)
    assert capsys.readouterr().err == ""


def test_weights_that_change_in_a_process_leave_no_notes(compared, file):
    """As in training, where they do not come twice."""
    model = sharp()
    for _ in range(3):
        backend_of(model)
        with torch.no_grad():
            model.head.weight.mul_(0.9)
    assert len(compared) == 3 and len(kept(file)) == 1


def test_only_the_newest_notes_are_kept(file):
    old = [f"{number:064}" for number in range(1000)]
    file.write_text("\n".join(old), encoding="utf-8")
    backend_of(sharp())
    assert kept(file)[:-1] == old[1:]


def in_a_file_beside_the_package(monkeypatch):
    """Whose path begins like the package's; it changes late tokens, of which a tiny model has none."""

    def forward(self, tokens, original=GPT.forward, **options):
        logits = original(self, tokens, **options)
        logits[..., 200:] = 0
        return logits

    forward.__code__ = forward.__code__.replace(co_filename=f"{notes._PACKAGE}_mine.py")
    monkeypatch.setattr(GPT, "forward", forward)


def another_layer(monkeypatch):
    """For texts that are longer than those of a tiny model."""
    forward = nn.GELU.forward
    monkeypatch.setattr(
        nn.GELU, "forward", lambda self, x: forward(self, x) if x.shape[1] <= 17 else x.relu()
    )


def another_kernel(monkeypatch):
    """Also for longer texts."""
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


PATCHES = [in_a_file_beside_the_package, another_layer, another_kernel, a_replaced_object]


@pytest.mark.parametrize("patch", PATCHES)
def test_patched_code_counts_after_a_note(patch, monkeypatch):
    backend_of(sharp())
    patch(monkeypatch)
    assert isinstance(backend_of(sharp()), Forward)


def a_hook_of_all_modules():
    """Also for longer texts."""
    return nn.modules.module.register_module_forward_hook(
        lambda module, _, out: out * 2 if isinstance(module, nn.LayerNorm) and len(out[0]) > 17 else None
    )


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("context", [a_hook_of_all_modules, autocast])
def test_what_changes_all_models_counts_after_a_note(context):
    backend_of(sharp())
    with context():
        assert isinstance(backend_of(sharp()), Forward)


def formula(piece: bytes) -> list[int]:
    """The hashes of a piece, written out."""
    padded = piece + bytes(-len(piece) % 64)
    hashes = list(range(1, 9))
    for place in range(0, len(padded), 8):
        lane = place // 8 % 8
        word = int.from_bytes(padded[place : place + 8], sys.byteorder)
        mixed = (hashes[lane] ^ word) * 0x9E3779B97F4A7C15 % 2**64
        hashes[lane] = (mixed << 31 | mixed >> 33) % 2**64
    return hashes


@pytest.mark.parametrize("size", [1, 63, 64, 65, 2**20 + 5])
def test_each_piece_of_a_tensor_has_the_hashes_of_the_formula(size, monkeypatch):
    """A piece is a MiB; tensors begin anywhere, and any number of threads hashes them."""
    values = torch.randint(256, (1 + size,), dtype=torch.uint8)[1:]
    data = values.numpy().tobytes()
    expected = [*formula(data[: 2**20]), *(formula(data[2**20 :]) if size > 2**20 else [])]
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert list(notes._hashes([values], build.program())) == expected
