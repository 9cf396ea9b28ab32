import os
import stat

import pytest

from gpt.errors import InputError
from gpt.files import atomic_write, readable, shipped


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


def test_text_arrives_whole_in_utf8_with_the_permissions_of_a_plain_open(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with atomic_write(path) as file:
        file.write("caf\u00e9")
        assert not path.exists()
    assert path.read_bytes() == "caf\u00e9".encode()
    (tmp_path / "plain").write_text("", "utf-8")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_a_folder_of_strangers_beside_an_installed_package_is_not_taken(tmp_path):
    package = tmp_path / "site-packages" / "gpt"
    for folder in (package, package.parent / "configs"):
        folder.mkdir(parents=True)
    (package.parent / "pyproject.toml").write_text('name = "another"', "utf-8")
    with pytest.raises(InputError, match="no configs"):
        shipped("configs", package)
    (package / "configs").mkdir()
    assert shipped("configs", package) == package / "configs"


def test_a_name_that_is_not_utf8_is_readable():
    assert readable(os.fsdecode(b"caf\xe9 \xc3\xa9")) == "caf\\udce9 \u00e9"
