"""The image and its services, as read: Docker builds them only in the public continuous integration."""

import re
from pathlib import Path

import yaml

from gpt.cli import COMMANDS

ROOT = Path(__file__).parents[1]
LINES = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()


def test_the_image_has_all_that_an_installation_reads():
    copied = {word for line in LINES if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert all((ROOT / path).exists() for path in copied)
    assert copied >= {
        "pyproject.toml",
        "constraints.txt",
        "lock.txt",
        "README.md",
        "LICENSE",
        "gpt",
        "configs",
        "data",
    }
    kept = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert kept[0] == "*" and {f"!{path}" for path in copied} <= set(kept)


def test_it_runs_as_an_ordinary_user():
    assert [line for line in LINES if line.startswith("USER ")][-1] == "USER gpt"


def test_the_services_run_commands_of_the_program():
    services = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    cuda = yaml.safe_load((ROOT / "compose.cuda.yaml").read_text(encoding="utf-8"))["services"]
    assert set(cuda) == set(services)
    assert services["serve"]["command"][0] in COMMANDS and services["serve"]["stop_grace_period"] == "40s"
    assert services["serve"]["ports"] == ["127.0.0.1:8000:8000"] and "root" not in services["serve"]["user"]
    # A variable that one service requires would be required for `docker compose run gpt` too.
    assert ":?" not in re.sub(r"\$\$\{.*?\}", "", (ROOT / "compose.yaml").read_text(encoding="utf-8"))
    assert "$${GPT_API_KEY:?" in services["serve"]["entrypoint"][2]
    arguments = {one["build"]["args"]["TORCH"] for one in cuda.values()}
    arguments |= {match[1] for line in LINES if (match := re.match(r"ARG TORCH=(.*)", line))}
    assert arguments == {"--cuda", "--cpu"}
