"""samples.txt: a short text at each validation, to see what the numbers mean."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

from gpt.training.folder import RunFolder
from gpt.training.record import GrowingText
from gpt.training.shard import is_sharded


class Samples(Callback):
    """Continues an empty document from the same seed each time, so that the texts can be compared."""

    def __init__(self, folder: RunFolder, max_new_tokens: int = 64, temperature: float = 0.8) -> None:
        self.file = GrowingText(folder, "samples.txt")
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.newest = ""

    @rank_zero_only
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write a text."""
        if is_sharded(pl_module.model):  # type: ignore[arg-type]
            return  # the first process has only a part of the weights
        from gpt.generation import Sampling, stream

        tokenizer = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        pieces = stream(
            pl_module.model,  # type: ignore[arg-type]
            tokenizer,
            "",
            max_new_tokens=self.max_new_tokens,
            sampling=Sampling(temperature=self.temperature, top_k=50),
            seed=0,
        )
        self.newest = "".join(pieces).strip()
        self.file.text += f"--- step {trainer.global_step}\n{self.newest}\n\n"
        self.file.write()

    def state_dict(self) -> dict[str, Any]:
        """The length of the file."""
        return {"characters": len(self.file.text)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Cut the file to the length it had."""
        self.file.cut(state_dict["characters"])
