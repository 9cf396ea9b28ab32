"""The files that the first process keeps in a run's folder: the options, checkpoints and snapshots."""

from dataclasses import replace

import yaml

from gpt.data.module import TokenData
from gpt.errors import InputError
from gpt.files import file_sha256
from gpt.plain import JsonObject, as_dict
from gpt.progress import report
from gpt.run.checkpoint import Checkpoints
from gpt.run.folder import CONFIG, RunFolder, folder_of
from gpt.run.options import Options
from gpt.run.origin import Origin
from gpt.run.snapshots import Snapshots
from gpt.training.lora import ALPHA
from gpt.training.module import LanguageModel
from gpt.weights.adapters import BASE, AdapterPart, without_adapters
from gpt.weights.checkpoint import ModelPart, RunPart
from gpt.weights.formats.table import Weights
from gpt.weights.load import PretrainedGPT
from gpt.weights.runs import checkpoints_of


class Store:
    """The folder of a run. `remove_later` clears it of what does not belong to the past of `run`.

    Args:
        files: the locked folder, see `locked_folder`.
        options: the run's options.
        origin: what the run starts from.
        run: the state of the run.
        module, data: what is trained, on what.
        new_best: why the best checkpoint begins again, if it does.
    """

    def __init__(
        self,
        files: RunFolder,
        options: Options,
        origin: Origin,
        run: RunPart,
        module: LanguageModel,
        data: TokenData,
        new_best: str = "",
    ) -> None:
        self.files = files
        top = files.top
        top.remove_unfinished()
        if not top.is_file(CONFIG):  # write it before anything else: it marks the folder as a run's
            self.write_config(run)
        self.checkpoints = Checkpoints(files, options.keep_checkpoints, run.step)
        self.checkpoints.take_over(origin.checkpoint, run)
        if new_best:
            report(f"{new_best}: the best checkpoint begins again")
            self.checkpoints.begin_best_again()
        self.snapshots = Snapshots(files, options.snapshot_megabytes)
        self.write_config(run)
        rank = module.options.lora.rank
        is_new = origin.checkpoint is None
        self._model_part = ModelPart(
            config=module.config.to_dict(),
            tokenizer=data.tokenizer.to_dict(),
            template=data.prepared.meta.template,
            adapters=self._adapters(module, rank, is_new) if rank else None,
        )

    def remove_later(self, run: RunPart) -> None:
        """Remove later snapshots, and the summary of a run that had ended and goes on.

        They are gone for good, so this comes after all that can keep the run from beginning.
        """
        self.snapshots.remove_after(run.step)
        if has_ended(self.files):
            self.files.top.remove("summary.json")

    def write_config(self, run: RunPart) -> None:
        """Write the run's options."""
        with self.files.top.write(CONFIG) as file:
            file.write(yaml.safe_dump(run.options, sort_keys=False, allow_unicode=True))

    def save_snapshot(self, run: RunPart, loss: float, weights: Weights, temperature: float) -> None:
        """Save a snapshot of the weights, whose validation found the temperature; 1 without one."""
        self.snapshots.save(run.step, loss, weights, replace(self._model_part, temperature=temperature))

    def save_checkpoint(self, run: RunPart, tensors: Weights, temperature: float) -> None:
        """Write a checkpoint; the temperature is that of `save_snapshot`."""
        self.checkpoints.save(tensors, replace(self._model_part, temperature=temperature), run)

    def _adapters(self, module: LanguageModel, rank: int, is_new: bool) -> JsonObject:
        """Return the fields of `AdapterPart`, and write the fixed weights into the folder `base` once."""
        self.files.top.below(BASE).close()  # raises InputError if it is a link
        base = self.files.path / BASE
        if is_new or not (base / "model.safetensors").is_file():
            weights = without_adapters(module.model.state_dict())
            PretrainedGPT.from_weights(module.config, weights).save_pretrained(base)
        part = AdapterPart(rank=rank, scale=ALPHA / rank, base=file_sha256(base / "model.safetensors"))
        return as_dict(part)


def locked_folder(origin: Origin, name: str) -> RunFolder:
    """Return the run's locked folder: the one locked before its checkpoint was read, or a new one.

    Raises InputError if another process has begun this run since then.
    """
    existing = origin.folder
    files = origin.claim.take(existing) if existing else origin.claim.take_new(folder_of(name))
    checkpoints = [] if origin.checkpoint else checkpoints_of(files.path)
    if checkpoints:
        what = "another process has begun this run meanwhile: start again to resume it"
        raise InputError(f"{checkpoints[0]} is there, {what}")
    return files


def has_ended(files: RunFolder) -> bool:
    """Whether the run in this folder has ended by itself: one that was killed has no summary."""
    return files.top.is_file("summary.json")
