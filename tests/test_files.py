import os
import stat

import pytest

from gpt import files
from gpt.errors import InputError
from gpt.files import atomic_write, shipped


def test_text_is_utf8_and_arrives_whole(tmp_path):
    with atomic_write(tmp_path / "new" / "a.txt") as file:
        file.write("caf\u00e9")
        assert not (tmp_path / "new" / "a.txt").exists()
    assert (tmp_path / "new" / "a.txt").read_bytes() == "caf\u00e9".encode()


def fail(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["in the block", "fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, moment):
    path = tmp_path / "a.txt"
    path.write_text("old", "utf-8")
    if hasattr(os, moment):
        monkeypatch.setattr(os, moment, fail)
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as file:
        file.write("half of the new")
        if not hasattr(os, moment):
            fail()
    assert path.read_text("utf-8") == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_permissions_are_those_of_a_plain_open(tmp_path):
    (tmp_path / "plain").write_text("", "utf-8")
    with atomic_write(tmp_path / "atomic"):
        pass
    plain, atomic = (stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("plain", "atomic"))
    assert plain == atomic


def test_a_checkout_has_its_folders_at_its_top():
    assert (shipped("configs") / "quick.yaml").is_file()
    assert (shipped("recipes") / "python-docs.yaml").is_file()


def test_a_folder_of_strangers_beside_an_installed_package_is_not_taken(tmp_path):
    package = tmp_path / "site-packages" / "gpt"
    for folder in (package, tmp_path / "site-packages" / "configs"):
        folder.mkdir(parents=True)
    with pytest.raises(InputError, match="no configs"):
        shipped("configs", package)
    (package.parent / "pyproject.toml").write_text('name = "another"', "utf-8")
    with pytest.raises(InputError, match="no configs"):
        shipped("configs", package)
    (package / "configs").mkdir()
    assert shipped("configs", package) == package / "configs"


def test_a_name_that_is_not_utf8_is_readable():
    assert files.readable(os.fsdecode(b"caf\xe9 \xc3\xa9")) == "caf\\udce9 \u00e9"
