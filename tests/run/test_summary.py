"""What a person reads at the end of a run."""

from gpt.run.summary import for_people

SUMMARY = {
    "text": "novel.txt",
    "val_loss": 3.0,
    "val_bits_per_byte": 1.5,
    "val_standard_error": 0.0412,
    "best_loss": 2.8,
    "best_step": 400,
    "train_seconds": 612.3,
    "steps": 500,
    "tokens": 1_536_000,
    "parameters": 1_650_000,
}


def test_four_lines_tell_the_result_the_run_its_folder_and_the_next_command():
    lines = dict(for_people(SUMMARY, "runs/mine", is_chat=False))
    assert list(lines) == ["result", "trained", "saved", "next"]
    expected = "1.400 ± 0.041 bits per byte of held-out text (lower is better), best after step 400"
    assert lines["result"] == expected
    expected = "500 steps in 10.2 minutes: 1,650,000 parameters, 1,536,000 tokens of novel.txt"
    assert lines["trained"] == expected
    assert lines["next"] == "gpt generate --checkpoint runs/mine --prompt 'The'"


def test_a_run_that_was_not_validated_says_so():
    summary = {**SUMMARY, "val_bits_per_byte": None, "best_loss": None}
    assert dict(for_people(summary, "runs/mine", is_chat=True))["result"].startswith("not validated")
