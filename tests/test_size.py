"""scripts/size.py counts the lines of each room and language."""

import size


def test_lines_are_counted_by_room_and_language(tmp_path):
    for name, lines in (("gpt/a.py", 2), ("gpt/run/b.py", 3), ("gpt/run/c.cpp", 5), ("tests/x/d.py", 7)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x\n" * lines, encoding="utf-8")
    (tmp_path / "gpt" / "run" / "weights.bin").write_bytes(b"\xff\n")
    assert size.count_lines(tmp_path) == {
        "gpt": {"Python": 2},
        "gpt/run": {"Python": 3, "C++": 5},
        "tests": {"Python": 7},
    }
