"""The image and its services, as read: Docker builds them only in the public continuous integration."""

import yaml
from processes import ROOT

from gpt.cli import COMMANDS

LINES = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ").splitlines()


def test_the_image_has_all_that_an_installation_reads_and_an_ordinary_user():
    copied = {word for line in LINES if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert all((ROOT / path).exists() for path in copied)
    files = "pyproject.toml constraints.txt lock.txt README.md LICENSE gpt configs data"
    assert copied >= set(files.split())
    kept = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert kept[0] == "*" and {f"!{path}" for path in copied} <= set(kept)
    assert [line for line in LINES if line.startswith("USER ")][-1] == "USER gpt"


def test_the_services_run_commands_of_the_program():
    services = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"]
    cuda = yaml.safe_load((ROOT / "compose.cuda.yaml").read_text("utf-8"))["services"]
    assert set(cuda) == set(services)
    serve = services["serve"]
    assert serve["command"][0] in COMMANDS and serve["stop_grace_period"] == "40s"
    assert serve["ports"] == ["127.0.0.1:8000:8000"] and "root" not in serve["user"]
    # Not `:?` in compose.yaml, which would require the variable for `docker compose run gpt` too.
    assert "$${GPT_API_KEY:?" in serve["entrypoint"][2]
    assert {service["build"]["args"]["TORCH"] for service in cuda.values()} == {"--cuda"}
    assert "ARG TORCH=--cpu" in LINES
