"""Begin a run from given weights: defaults for tuning them, which follow from their size and the text."""

from dataclasses import replace

from gpt.data.options import DataOptions
from gpt.data.prepare import prepare_named
from gpt.data.prepared import Prepared, is_prepared, positions_for
from gpt.data.split import held_out_bytes
from gpt.errors import InputError
from gpt.plain import as_dict
from gpt.plan.command import TUNED_CONTEXT
from gpt.plan.rule import BYTES_PER_TOKEN, bytes_to_read
from gpt.progress import report
from gpt.run.arguments import Given, Values, options_of, recipe, typed
from gpt.run.options import LIMITS, Options
from gpt.run.origin import HandedOn, Origin
from gpt.training.speed import Shape, time_machine
from gpt.weights.load import StoredModel, read_weights

# Defaults for tuning GPT-2 small. Smaller models take more steps, at higher learning rates.
_GPT2_SMALL = 124e6
_TUNING_RATE = 5e-5
_MOST_RATE = 6e-3
_TUNING_STEPS = 200
_VALIDATIONS = 5  # during a tuning
_PATIENCE = 4  # validations without a lower loss that end a tuning with a time limit
_TUNING_TOKENS = 1024  # per batch, which take a gigabyte of activations
_LEAST_TUNED = 1 << 16  # bytes of text that a tuning with a time limit reads at least
_CAN_CHANGE = ("model.config.dropout", "model.config.window_dropout", "model.config.context_length")
_ADAPTERS = 8  # rank of the adapters that are tuned where memory is too small for all weights


def tuned(options_given: Given, minutes: float | None) -> Origin:
    """Return the origin of a run that tunes the weights `model.init_from`; `minutes` limit its time.

    A later source overrides an earlier one: the recipe of a tuning, unless a --config is given; the defaults
    for weights of this size; the weights' template; what is given. What the weights decide comes last.
    """
    given = {name: value for name, value in options_given.all.items() if not _is_of_shape(name)}
    options_of(given)  # report errors before the weights are read
    weights = read_weights(given["model.init_from"])
    _check_own(weights, options_given)
    if weights.template:
        given = {**typed({"data": {"template": as_dict(weights.template)}}), **given}
    context, text = _positions(weights, given, minutes)
    values = {**_defaults(weights, given, context, minutes), **given}
    if "config" not in given:
        is_lora = bool(values.get("model.lora.rank"))
        values = {**recipe("lora" if is_lora else "finetune"), **values}
    options = _on_weights(options_of(values), weights)
    report(*_positions_line(weights.config.context_length, options.model.config.context_length))
    return Origin(
        options=options,
        tokenizer=weights.tokenizer,
        weights=HandedOn(weights),
        text=HandedOn(text),
        chose_early_stopping="early_stopping" not in given,
    )


def _is_of_shape(name: str) -> bool:
    """Whether an option is of the shape, which weights decide. Recipes have it for runs from scratch."""
    return name.startswith("model.config.") and name not in _CAN_CHANGE


def _check_own(weights: StoredModel, given: Given) -> None:
    """Raise InputError if the command line asks for what the weights do not have, or a file for a vocabulary.

    A recipe may say that a vocabulary is learned: that is for runs from scratch.
    """
    own = given.own
    shape = as_dict(weights.cropped().config)
    for name in filter(_is_of_shape, own):
        has = shape[name.removeprefix("model.config.")]
        if own[name] not in (None, has):
            raise InputError(f"--{name} {own[name]}: the weights have {has}, leave it out")
    vocabulary = given.asked.get("data.vocabulary")
    if vocabulary is not None and ("data.vocabulary" in own or vocabulary != "learn"):
        raise InputError("--data.vocabulary: weights to start from keep their own, leave it out")


def _positions(weights: StoredModel, given: Values, minutes: float | None) -> tuple[int, Prepared | None]:
    """Return the positions to tune, and the text if it had to be prepared to know them.

    By default they are as many as the examples need, if the weights have them.
    """
    most = weights.config.context_length
    usual = min(TUNED_CONTEXT, most)
    if asked := given.get("model.config.context_length"):
        return asked, None
    if usual == most or minutes is not None:  # with a time limit, the positions decide how much is read
        return usual, None
    data = _on_weights(options_of({**given, "model.config.context_length": usual}), weights).data
    prepared = prepare_named(data.corpus, weights.tokenizer, data.reading)
    return min(most, max(usual, positions_for(prepared.example_lengths()))), prepared


def _defaults(weights: StoredModel, given: Values, context: int, minutes: float | None) -> Values:
    """Return defaults for tuning weights of this size with this context length.

    With a time limit, a tuning reads as much text as it can train on once, and validates for at most a
    seventh of the time. It trains adapters where memory is too small for all weights.
    """
    config = weights.config
    windows = given.get("data.batch_size", max(1, _TUNING_TOKENS // context))
    shape = Shape(
        vocab_size=config.vocab_size,
        context_length=context,
        emb_dim=config.emb_dim,
        num_layers=config.num_layers,
        batch_size=windows,
    )
    smaller = max(1.0, _GPT2_SMALL / (shape.blocks + shape.table))  # by this factor than GPT-2 small
    steps = round(_TUNING_STEPS * smaller**0.5)
    values: Values = {"model.config.context_length": context, "data.batch_size": windows}
    if minutes is not None:
        values |= _within_minutes(shape, given, minutes, steps)
    elif not given.keys() & set(LIMITS):
        values["trainer.max_steps"] = steps
    is_lora = bool({**values, **given}.get("model.lora.rank"))
    values["model.optimizer.lr"] = _tuning_rate(smaller, is_lora)
    return values


def _within_minutes(shape: Shape, given: Values, minutes: float, steps: int) -> Values:
    """Return the defaults of a tuning with a time limit; `steps` would be usual without one."""
    machine = time_machine(given.get("trainer.accelerator"), given.get("trainer.precision"))
    corpus = given.get("data.corpus", DataOptions.corpus)
    most = bytes_to_read(machine, minutes, _LEAST_TUNED, shape)
    batches = held_out_bytes(most) / BYTES_PER_TOKEN / shape.tokens  # of held-out text
    # To score a batch takes a third of a step. With two steps for each, a validation takes a seventh.
    values: Values = {
        "data.most_bytes": None if is_prepared(corpus) else most,
        "trainer.max_time": f"{60 * minutes}s",
        "early_stopping": _PATIENCE,
        "trainer.val_check_interval": max(steps // _VALIDATIONS, round(2 * batches)),
    }
    if shape.memory() > machine.memory and "model.lora.rank" not in given:
        values["model.lora.rank"] = _ADAPTERS
        what = f"all weights would take {shape.memory() / 1e9:.1f} GB of memory"
        report(f"{what}, and {machine.memory / 1e9:.1f} GB are free: adapters are trained")
    return values


def _tuning_rate(smaller: float, is_lora: bool) -> float:
    """Return the peak learning rate for weights `smaller` times as few as GPT-2 small's: they take more."""
    rate = min(_TUNING_RATE * smaller ** (2 / 3), _MOST_RATE)
    return 10 * rate if is_lora else rate  # adapters start at zero


def _on_weights(options: Options, weights: StoredModel) -> Options:
    """Complete the options by what the weights decide."""
    shape = options.model.config
    own = weights.cropped().config
    config = replace(own.with_dropout_of(shape), context_length=shape.context_length)
    data = replace(options.data, vocabulary=None)
    return replace(options, model=replace(options.model, config=config), data=data)


def _positions_line(before: int, now: int) -> list[str]:
    """Return a line that says how the table of positions is cropped or stretched, if it is."""
    if now > before:
        how = "the weights need some hundred steps to suit it"
        return [f"the weights' table of {before} positions is interpolated to {now}: {how}"]
    if now < before:
        how = f"--model.config.context_length {before} keeps all"
        return [f"of the weights' {before} positions the first {now} are kept: {how}"]
    return []
