"""The vocabulary of a run: that of the weights it continues from, or the one that its options name."""

from dataclasses import asdict, dataclass
from typing import Any

from gpt.data.module import TokenData
from gpt.errors import InputError
from gpt.text.template import DEFAULT_TEMPLATE, Template
from gpt.text.tokenizer import Tokenizer
from gpt.text.vocabulary import Learned, find_vocabulary
from gpt.training.output import report
from gpt.weights.checkpoint import read
from gpt.weights.load import read_once


@dataclass(frozen=True, kw_only=True)
class Inherited:
    """What the weights that a run continues from decide about its text; nothing for new weights."""

    tokenizer: Tokenizer | None = None
    bytes_per_token: float | None = None  # of the text that they were trained on

    def use(self, data: TokenData) -> None:
        """Encode with the tokenizer of the weights, unless the options lead to the same one."""
        if self.tokenizer and not (isinstance(data.vocabulary, Learned) and data.tokenizer == self.tokenizer):
            data.use(self.tokenizer)

    def warn(self, data: TokenData) -> None:
        """Report a text that the tokenizer of the weights encodes badly, and examples for new weights."""
        if self.tokenizer is None and data.prepared.template:
            report("examples alone teach new weights little: tune trained ones with --model.init_from")
        before, now = self.bytes_per_token, data.bytes_per_token
        if isinstance(before, float) and now < 0.6 * before:
            compared = f"{now:.2f} bytes a token, {before:.2f} on the text it was trained on"
            report(f"the model's vocabulary does not suit this text: {compared}")


def choose_vocabulary(options: Any) -> Inherited:
    """Set the model's shape and vocabulary in the options; InputError where they contradict given weights."""
    model, data, path = options.model, options.data, options.ckpt_path
    if model.init_from is not None and not path:  # a checkpoint has newer weights
        if data.vocabulary not in (None, "learn"):  # recipes say learn, for runs that start anew
            raise InputError("--data.vocabulary: weights to start from keep their own, leave it out")
        data.vocabulary = None
        found = read_once(model.init_from, model.config.context_length)
        vars(model.config).update({**found.config.to_dict(), "dropout": model.config.dropout})
        data.vocab_size = found.config.vocab_size
        if found.template and Template(**data.template.as_dict()) == DEFAULT_TEMPLATE:
            vars(data.template).update(asdict(found.template))
        return Inherited(tokenizer=found.tokenizer, bytes_per_token=found.bytes_per_token)
    if data.vocabulary is not None:
        wanted = find_vocabulary(data.vocabulary, data.vocab_size)
        size = wanted.n_vocab
        if size is None or (isinstance(wanted, Learned) and wanted.at_most):  # the text decides: prepare it
            template = Template(**data.template.as_dict())
            size = TokenData(**data.as_dict() | {"template": template}).tokenizer.n_vocab
        model.config.vocab_size = data.vocab_size = size
    saved = read(path, checksums=False)["gpt"].get("tokenizer") if path else None
    return Inherited(tokenizer=Tokenizer.from_dict(saved) if saved else None)
