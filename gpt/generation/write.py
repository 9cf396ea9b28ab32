"""The command `gpt generate`: it writes text in the terminal, for one prompt or interactively."""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

from gpt.config import USUAL_TEMPERATURE, USUAL_TOP_K
from gpt.evaluation.copied import Copied, training_text
from gpt.generation.api import stream_samples
from gpt.generation.build import built_meanwhile
from gpt.generation.decoding import for_decoding, suits_program
from gpt.generation.sampling import Sampling
from gpt.progress import emphasised, for_terminal, notice
from gpt.weights.load import Device, find, load_with_template
from gpt.weights.rounding import WeightPrecision
from gpt.weights.runs import run_of


def write(
    checkpoint: Path | None = None,
    prompt: str = "",
    interactive: bool = False,
    max_new_tokens: int = 128,
    temperature: float = USUAL_TEMPERATURE,
    top_k: int | None = USUAL_TOP_K,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    num_samples: int = 1,
    stop: list[str] | None = None,
    precision: WeightPrecision | None = None,
    device: Device = "auto",
    show_copied: bool = False,
    copied_tokens: int = 12,
) -> None:
    """Print text that follows a prompt while it is generated.

    Args:
        checkpoint: a run, a checkpoint, an exported or imported folder, gpt2 or OWNER/NAME on the hub; by
            default the newest run.
        prompt: the beginning of the text; an empty one starts a new document. In a chat, the system message.
        interactive: ask for prompts until Ctrl-D. The arrow keys recall earlier prompts; Ctrl-C ends a text.
            A model that was tuned on examples holds a chat. It remembers the first sample of each reply, or
            what was written of it before Ctrl-C.
        max_new_tokens: stop after this many tokens, or at the end of the document.
        temperature: 0 always takes the most likely token, 1 is the model's own distribution.
        top_k: draw only from the k most likely tokens; null for all.
        top_p: draw from the smallest set of tokens whose probability reaches this.
        min_p: draw from tokens at least this many times as likely as the most likely one.
        repetition_penalty: a value above 1 makes tokens that came before less likely.
        seed: the same seed gives the same text.
        num_samples: how many texts to write.
        stop: a text ends before this string. \\n in it means a newline and \\t a tab. It may be given several
            times.
        precision: the precision of the weights, by default the model's own. On a CPU bfloat16 is faster,
            int8 more so, and int4 most, which costs a little of the text's quality.
        device: where the model runs; auto takes a GPU if there is one.
        show_copied: print a text only when it is complete, with [[ ]] around passages that are copied
            verbatim from the run's training text.
        copied_tokens: how many tokens in a row count as copied, at least.
    """
    sampling = Sampling(
        repetition_penalty=repetition_penalty, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    if isinstance(sys.stdout, io.TextIOWrapper):  # the terminal's encoding may lack characters of the text
        sys.stdout.reconfigure(errors="replace")
    path = find(checkpoint)
    loaded, tokenizer, template = load_with_template(path, device)
    model = for_decoding(loaded, precision)
    mark = None
    if show_copied:
        mark = Copied(training_text(run_of(path.resolve()), tokenizer), tokenizer, copied_tokens).mark
    texts = partial(
        stream_samples,
        model,
        tokenizer,
        max_new_tokens=max_new_tokens,
        num_samples=num_samples,
        sampling=sampling,
        seed=seed,
        stop=[text.replace(r"\n", "\n").replace(r"\t", "\t") for text in stop or []],
    )
    with built_meanwhile(suits_program(model)):
        if not interactive:
            _show(prompt, texts(prompt), num_samples, mark)
            return
        if template is None:
            notice("this checkpoint has no template for a chat: the text of each line is continued")
        messages = [{"role": "system", "content": prompt}] if prompt else []
        for line in chain([prompt] if prompt and template is None else [], ask()):
            try:
                if template is None:
                    _show(line, texts(line), num_samples, mark)
                    continue
                messages.append({"role": "user", "content": line})
                pieces = texts(template.prompt(tokenizer, messages))
                messages.append({"role": "assistant", "content": ""})
                _show("", noted(pieces, messages[-1]), num_samples, mark)
            except KeyboardInterrupt:
                print()


def noted(pieces: Iterator[tuple[int, str]], reply: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Pass the pieces on, and add those of the first sample to the reply, which Ctrl-C may end early."""
    for sample, piece in pieces:
        if sample == 0:
            reply["content"] += piece
        yield sample, piece


def _show(
    prompt: str, pieces: Iterator[tuple[int, str]], num_samples: int, mark: Callable[[str], str] | None
) -> None:
    """Print samples one after another.

    All are decoded together. The first is printed while it is written. With `mark`, every sample is printed
    when it is complete.
    """
    texts = [""] * num_samples
    if num_samples > 1:
        print("--- sample 1")
    _print(prompt, end="", is_emphasised=True)
    for sample, piece in pieces:
        texts[sample] += piece
        if sample == 0 and not mark:
            _print(piece, end="")
    _print(mark(texts[0]) if mark else "")
    for number, text in enumerate(texts[1:], start=2):
        print(f"\n--- sample {number}")
        _print(prompt, end="", is_emphasised=True)
        _print(mark(text) if mark else text)


def _print(text: str, end: str = "\n", is_emphasised: bool = False) -> None:
    safe = for_terminal(text, sys.stdout)
    print(emphasised(safe, sys.stdout) if is_emphasised and safe else safe, end=end, flush=True)


def ask() -> Iterator[str]:
    """Yield typed prompts until Ctrl-D. Earlier prompts can be recalled where Python has readline."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with suppress(ImportError):  # Python for Windows has no readline
        import readline  # noqa: F401 - importing it is what makes input() keep a history
    while True:
        try:
            if line := input("> "):
                yield line
        except (EOFError, RuntimeError):  # RuntimeError: the process has no standard input
            print()
            return
        except KeyboardInterrupt:
            print()
