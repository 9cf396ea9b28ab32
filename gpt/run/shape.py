"""The model's shape and vocabulary: those of the weights that a run begins with, or what its options name."""

from dataclasses import dataclass, replace
from typing import Any

from gpt.data.module import TokenData
from gpt.errors import InputError
from gpt.plain import as_dict
from gpt.run.options import Options
from gpt.text.template import DEFAULT_TEMPLATE
from gpt.text.tokenizer import Tokenizer
from gpt.text.vocabulary import Learned, find_vocabulary
from gpt.training.output import report
from gpt.weights.checkpoint import Checkpoint
from gpt.weights.load import read_once


@dataclass(frozen=True, kw_only=True)
class Inherited:
    """What the weights that a run continues from decide about its text; nothing for new weights."""

    tokenizer: Tokenizer | None = None
    bytes_per_token: float | None = None  # of the text that they were trained on

    def warn(self, data: TokenData) -> None:
        """Report a text that the tokenizer of the weights encodes badly, and examples for new weights."""
        if self.tokenizer is None and data.prepared.template:
            report("examples alone teach new weights little: tune trained ones with --model.init_from")
        before, now = self.bytes_per_token, data.bytes_per_token
        if before is not None and now < 0.6 * before:
            compared = f"{now:.2f} bytes a token, {before:.2f} on the text it was trained on"
            report(f"the model's vocabulary does not suit this text: {compared}")


def settle(options: Options, checkpoint: Checkpoint | None) -> tuple[Options, Inherited]:
    """The options with the shape and the template that the weights or the text decide, and what they decide.

    InputError where options contradict the weights that are given.
    """
    if checkpoint is not None:
        saved = checkpoint.model.tokenizer
        return options, Inherited(tokenizer=Tokenizer.from_dict(saved) if saved else None)
    if options.model.init_from is not None:
        return _of_weights(options, options.model.init_from)
    if options.data.vocabulary is None:
        return options, Inherited()
    wanted = find_vocabulary(options.data.vocabulary, options.model.config.vocab_size)
    size = wanted.n_vocab
    if size is None or (isinstance(wanted, Learned) and wanted.at_most):  # the text decides: prepare it
        size = token_data(options, Inherited()).tokenizer.n_vocab
    config = replace(options.model.config, vocab_size=size)
    return replace(options, model=replace(options.model, config=config)), Inherited()


def token_data(options: Options, inherited: Inherited) -> TokenData:
    """The text of a run, encoded with the tokenizer of its weights where they have one."""
    config, seed = options.model.config, options.seed_everything
    sizes: dict[str, Any] = {"vocab_size": config.vocab_size, "context_length": config.context_length}
    data = TokenData(**as_dict(options.data), **sizes, seed=seed)
    same = isinstance(data.vocabulary, Learned) and data.tokenizer == inherited.tokenizer
    if inherited.tokenizer and not same:
        data.use(inherited.tokenizer)
    return data


def _of_weights(options: Options, path: str) -> tuple[Options, Inherited]:
    if options.data.vocabulary not in (None, "learn"):  # recipes say learn, for runs that start anew
        raise InputError("--data.vocabulary: weights to start from keep their own, leave it out")
    found = read_once(path, options.model.config.context_length)
    config = replace(found.config, dropout=options.model.config.dropout)
    data = replace(options.data, vocabulary=None)
    if found.template and data.template == DEFAULT_TEMPLATE:
        data = replace(data, template=found.template)
    settled = replace(options, model=replace(options.model, config=config), data=data)
    return settled, Inherited(tokenizer=found.tokenizer, bytes_per_token=found.bytes_per_token)
