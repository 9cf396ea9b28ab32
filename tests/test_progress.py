import io

import pytest

from gpt import progress as progress_module
from gpt.progress import emphasised, labelled, progress, report, short


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves by hand."""
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    return now


def test_off_a_terminal_lines_are_rare_and_name_the_time_left(clock, capsys):
    with progress("tokenizing", 100_000_000, done=20_000_000) as advance:
        advance(1_000_000)
        clock[0] += 20.0
        advance(19_000_000)
        advance(1)
    assert capsys.readouterr().err == "tokenizing: 40 MB, 1.0 MB/s, 60 s left\n"


def test_things_are_counted_as_they_are(clock, capsys):
    with progress("drawing", 144, unit="pictures") as advance:
        clock[0] += 16.0
        advance(16)
    assert capsys.readouterr().err == "drawing: 16 of 144 pictures, 128 s left\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal in the place of stderr."""
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    return stream


CLIPBOARD = "a\tb\n\x1b]52;c;aGk=\x07\x9b\r\x00é"


def test_a_terminal_gets_no_control_characters(monkeypatch):
    stream = terminal(monkeypatch)
    report(CLIPBOARD, prefix="")
    assert stream.getvalue() == "a\tb\n\\x1b]52;c;aGk=\\x07\\x9b\\r\\x00é\n"


def test_a_total_that_is_not_known_at_first(clock, capsys):
    with progress("training", None, unit="steps") as advance:
        for total in (None, 90, None):  # the last one stays
            clock[0] += 20.0
            advance(10, "", total)
    assert capsys.readouterr().err.splitlines() == [
        "training: 10 steps",
        "training: 20 of 90 steps, 140 s left",
        "training: 30 of 90 steps, 120 s left",
    ]


def test_without_stderr_nothing_is_shown(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)  # `2>&-`
    with progress("drawing", 10) as advance:
        advance(10)


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (999, "", "999"),
        (999_700, "", "1M"),
        (1_500_000, "", "1.5M"),
        (999_950_000, "B", "1 GB"),
        (8.59e9, "B", "8.59 GB"),
        (1.3e11, "B", "130 GB"),
        (4.2e12, "B", "4,200 GB"),
    ],
)
def test_numbers_are_short(value, unit, expected):
    assert short(value, unit) == expected


def test_a_pipe_gets_a_text_as_it_is(capsys):
    report(CLIPBOARD, prefix="")
    assert capsys.readouterr().err == CLIPBOARD + "\n"


@pytest.mark.parametrize("unit", ["bytes", "pictures"])
def test_a_terminal_gets_a_bar(unit, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = terminal(monkeypatch)
    with progress("drawing [/a] [b]", 10, unit=unit) as advance:  # no markup
        advance(10)
    assert "drawing [/a] [b]" in stream.getvalue() and "10" in stream.getvalue()


def test_only_a_terminal_gets_colours(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert labelled([("a", "b"), ("long", "c")], io.StringIO()) == ["a     b", "long  c"]
    assert emphasised("a", Terminal()) == "\x1b[1;36ma\x1b[0m"
    assert labelled([("a", "\x1b[2J")], Terminal()) == ["\x1b[1;36ma\x1b[0m  \\x1b[2J"]
    monkeypatch.setenv("NO_COLOR", "1")
    assert emphasised("a", Terminal()) == "a"
