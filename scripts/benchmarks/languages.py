"""`benchmark.py languages`: a learned vocabulary beside GPT-2's prefix of the same size, in any language.

The text is a folder of manual pages (.gz), HTML, Mallard, messages (.mo) or plain text, as Debian's packages
carry them under free licences: `dpkg-deb -x manpages-ru_*.deb FOLDER`. Where a part of it is not translated,
`--script ARABIC` keeps the lines in that script. Both runs are the quick one and train for the same time, on
the same documents.
"""

import gettext
import gzip
import html
import io
import json
import math
import re
import tempfile
import time
import unicodedata
from pathlib import Path

from benchmarks.common import Report, run_python, say

PREFIX, LEARNED = "gpt2:2048", "learn:2048"
SECONDS = 60
# Requests of roff that hold no text, but for headings and fonts, whose arguments are text.
SILENT = set("de if ie el nr ds so ft ad nh TH ll in ti sp fi nf RS RE PD ta".split())  # noqa: SIM905


def run(quick: bool, text: Path, script: str = "") -> Report:
    """Train with both; `quick` shortens both, as a smoke test."""
    rows, scores = [], {}
    vocabularies = PREFIX, LEARNED + (":marks" if script else "")  # scripts with vowel signs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        characters = _extract(text, folder / "text", script)
        bytes_a_character = sum(path.stat().st_size for path in (folder / "text").iterdir()) / characters
        for vocabulary in vocabularies:
            say(vocabulary)
            began = time.perf_counter()
            limit = ["--trainer.max_steps", "10"] if quick else _time_limit(SECONDS)
            options = ["--data.corpus", "text", "--data.vocabulary", vocabulary, "--run", vocabulary[:4]]
            _gpt("fit", "--config", "quick", *options, *limit, folder=folder)
            seconds = time.perf_counter() - began
            summary = json.loads((folder / "runs" / vocabulary[:4] / "summary.json").read_text("utf-8"))
            sample = ["--checkpoint", f"runs/{vocabulary[:4]}", "--max_new_tokens", "200", "--seed", "1"]
            written = _gpt("generate", *sample, "--temperature", "0.7", folder=folder)
            scores[vocabulary] = summary["val_bits_per_byte"]
            bytes_a_token = summary["val_loss"] / math.log(2) / summary["val_bits_per_byte"]
            rows.append(
                {
                    "vocabulary": vocabulary,
                    "characters a token": bytes_a_token / bytes_a_character,
                    "steps": summary["steps"],
                    "seconds": seconds,
                    "bits per byte": summary["val_bits_per_byte"],
                    "broken characters in 200 tokens": written.count("\ufffd"),
                    "sample": " ".join(written.split())[:60],
                }
            )
    prefix, learned = (scores[vocabulary] for vocabulary in vocabularies)
    return Report(
        title=f"{text.name}: {characters:,} characters",
        rows=rows,
        ratios={"learned_vs_prefix": learned / prefix},
        bars={"lower is better": scores},
        unit="bits per byte on the documents held out",
        notes=["Seconds are whole processes. learned_vs_prefix is better when lower."],
    )


def _time_limit(seconds: float) -> list[str]:
    return ["--trainer.max_steps", "-1", "--trainer.max_time", json.dumps({"seconds": seconds})]


def _extract(source: Path, target: Path, script: str) -> int:
    """Write the text of each file of a folder, a document each; the number of characters."""
    target.mkdir()
    total = 0
    for number, path in enumerate(sorted(source.rglob("*"))):
        if path.is_symlink() or path.suffix not in READERS:
            continue
        read, data = READERS[path.suffix], path.read_bytes()
        try:
            content = read(gzip.decompress(data) if path.suffix == ".gz" else data)
        except UnicodeDecodeError:
            continue
        if script:
            content = "".join(line for line in content.splitlines(True) if _is_in(line, script))
        if len(content) > 300:
            (target / f"{number:06}.txt").write_text(content, encoding="utf-8")
            total += len(content)
    if not total:
        raise SystemExit(f"{source} has no pages in UTF-8")
    return total


def _is_in(line: str, script: str) -> bool:
    """Whether most letters of a line have names in Unicode that begin with the script's."""
    letters = [letter for letter in line if letter.isalpha()]
    found = sum(unicodedata.name(letter, "").startswith(script.upper()) for letter in letters)
    return 2 * found > len(letters)


def _from_messages(data: bytes) -> str:
    catalogue = vars(gettext.GNUTranslations(io.BytesIO(data)))["_catalog"]
    messages = [text for key, text in catalogue.items() if key and isinstance(text, str)]
    return re.sub("[_~]", "", "\n".join(messages))  # marks of a menu's keys


def _from_html(data: bytes) -> str:
    content = re.sub(r"(?s)<(script|style|head)\b.*?</\1>", "", data.decode())
    lines = (" ".join(line.split()) for line in html.unescape(re.sub(r"<[^>]*>", "\n", content)).split("\n"))
    return "\n".join(line for line in lines if line) + "\n"


def _from_roff(data: bytes) -> str:
    lines = []
    content = re.sub(r"(?ms)^\.\s*de\b.*?^\.\.\s*$", "", data.decode())  # definitions of macros
    for line in content.splitlines():
        request = re.match(r"[.'](?:\\\"|\s*(\w*)\s*(.*))", line)
        if request and (not request[1] or request[1] in SILENT):
            continue
        text = request[2].replace('"', "") if request else line
        text = re.sub(r"\\\[u([0-9A-F]{4})\]", lambda found: chr(int(found[1], 16)), text)
        text = re.sub(r"\\f(\[\w*\]|\(..|.)|\\s[+-]?\d|\\&", "", text)
        text = text.replace("\\-", "-").replace("\\(aq", "'").replace("\\(bu", "*").replace("\\e", "\\")
        lines.append(re.sub(r"\\(\(..|\[[^\]]*\]|\*.|[ ~])", " ", text))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


READERS = {
    ".gz": _from_roff,
    ".html": _from_html,
    ".page": _from_html,
    ".mo": _from_messages,
    ".txt": bytes.decode,
}


def _gpt(*arguments: str, folder: Path) -> str:
    return run_python(["-m", "gpt.cli", *arguments], folder, {"GPT_CACHE": str(folder / "cache")})
