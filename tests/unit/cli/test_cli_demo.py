"""What a demonstration prints, on a terminal of the usual width."""

from rich.console import Console

from tie.cli.demo import _checklist


def test_a_fact_that_is_too_long_goes_on_below_its_beginning():
    console = Console(highlight=False, width=80)
    text = "opened 0 times, read 0 times by any process, the new runtime included"
    with console.capture() as capture:
        console.print(_checklist([("weight files", text, True), ("model owner", "the same", False)]))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert lines == [
        "  ✓ weight files: opened 0 times, read 0 times by any process, the new runtime",
        "    included",
        "  ✗ model owner: the same",
    ]
