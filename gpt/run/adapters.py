"""The fixed weights of a run with adapters lie once in its folder, its checkpoints hold the adapters."""

from typing import Any

from lightning.pytorch import Callback, Trainer

from gpt.files import file_sha256
from gpt.run.folder import RunFolder
from gpt.training.lora import LoRAConfig
from gpt.weights.adapters import AdapterPart, adapters_of, without_adapters
from gpt.weights.load import GPT


class AdaptersAlone(Callback):
    """Keeps the fixed weights in the run's folder, once, and out of its checkpoints."""

    def __init__(self, folder: RunFolder) -> None:
        self.run = folder

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        folder = self.run / "base"
        # A run that is resumed in its folder has them.
        if trainer.is_global_zero and (trainer.ckpt_path is None or not folder.is_dir()):
            weights = without_adapters(pl_module.model.state_dict())
            GPT.from_weights(pl_module.config, weights).save_pretrained(folder)
        trainer.strategy.barrier()
        lora: LoRAConfig = pl_module.lora
        base = file_sha256(folder / "model.safetensors")
        self._part = AdapterPart(rank=lora.rank, scale=lora.alpha / lora.rank, base=base)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["adapters"] = self._part
        checkpoint["state_dict"] = adapters_of(checkpoint["state_dict"])
