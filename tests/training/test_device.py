"""What suits a device, seen with the capabilities of devices that are not here."""

import math
from pathlib import Path

import pytest
import torch

from gpt import cgroups
from gpt.errors import InputError
from gpt.training import device
from gpt.training.device import choose_precision, default_precision, free_memory


@pytest.fixture
def machine(monkeypatch):
    """Lets the machine have a GPU or not, bfloat16 or not."""

    def install(gpu=False, gpu_bf16=False, mps=False, cpu_bf16=False, amx=False, slow_bf16=False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: gpu_bf16)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: cpu_bf16)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        seconds = {torch.float32: 2.0, torch.bfloat16: 3.0 if slow_bf16 else 1.0}
        monkeypatch.setattr(device, "_seconds", seconds.__getitem__)
        device.cpu_multiplies_bfloat16.cache_clear()

    yield install
    device.cpu_multiplies_bfloat16.cache_clear()


@pytest.mark.parametrize(
    ("parts", "accelerator", "precision"),
    [
        pytest.param({"gpu": True, "gpu_bf16": True}, "auto", "bf16-mixed", id="a new GPU"),
        pytest.param({"gpu": True, "cpu_bf16": True}, "auto", "16-mixed", id="a T4"),
        pytest.param({"gpu": True, "cpu_bf16": True}, "cpu", "bf16-mixed", id="a CPU beside a T4"),
        pytest.param({"mps": True, "cpu_bf16": True}, "auto", "32-true", id="a Mac"),
        pytest.param({"cpu_bf16": True}, "auto", "bf16-mixed", id="a CPU with bfloat16"),
        pytest.param({"cpu_bf16": True, "slow_bf16": True}, "auto", "32-true", id="a CPU, slow in bfloat16"),
        pytest.param({"cpu_bf16": True, "slow_bf16": True, "amx": True}, "auto", "bf16-mixed", id="AMX"),
        pytest.param({}, "auto", "32-true", id="any other CPU"),
    ],
)
def test_the_default_precision(parts, accelerator, precision, machine):
    machine(**parts)
    assert default_precision(accelerator) == precision


@pytest.mark.parametrize("accelerator", ["auto", "cpu"])
def test_float16_needs_a_gpu(accelerator, machine):
    machine()
    with pytest.raises(InputError, match="16-mixed needs a GPU: give bf16-mixed or 32-true"):
        choose_precision(accelerator, "16-mixed")
    machine(gpu=True)
    assert choose_precision("auto", "16-mixed") == "16-mixed"


MEMORY = "MemTotal: 9000 kB\nMemFree:  10 kB\nMemAvailable:   2000 kB\n"


@pytest.mark.parametrize(
    ("group", "processes", "expected"),
    [
        pytest.param(math.inf, 1, 2000 * 1024, id="what holds files is free"),
        pytest.param(1e6, 1, 1e6, id="a container has less"),
        pytest.param(math.inf, 4, 500 * 1024, id="processes share it"),
    ],
)
def test_the_memory_of_a_run(group, processes, expected, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *_: MEMORY)
    monkeypatch.setattr(cgroups, "free_memory", lambda: group)
    assert free_memory(torch.device("cpu"), processes) == pytest.approx(0.7 * expected)
