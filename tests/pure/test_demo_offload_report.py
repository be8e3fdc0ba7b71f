"""The problems that the offload demo finds in its own run."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from kvferry.cli.console import open_console
from kvferry.cli.demo_report import OffloadReport, PassLine
from kvferry.cli.main import app

TOKENS = 26_176


def line(name: str, computed: int, own_cache: int = 0, from_host: int = 0, from_disk: int = 0) -> PassLine:
    return PassLine(
        name=name,
        prompt_tokens=TOKENS,
        computed=computed,
        own_cache=own_cache,
        loaded=from_host + from_disk,
        from_host=from_host,
        from_disk=from_disk,
        seconds=3.0,
        requests=16,
        identical=16,
    )


def good_report() -> OffloadReport:
    lines = (
        line("no offload", TOKENS),
        line("nothing stored", 7744, from_host=18_432),
        line("stored", 1600, from_host=24_576),
        line("after SIGKILL", 1600, own_cache=1536, from_host=16_896, from_disk=6144),
    )
    return OffloadReport(lines, block_size=128, blocks_on_disk=48, cache_usage=0.0, processes_left=0)


def changed(index: int, **changes: object) -> OffloadReport:
    report = good_report()
    lines = [replace(each, **changes) if at == index else each for at, each in enumerate(report.lines)]
    return replace(report, lines=tuple(lines))


def test_a_good_run_has_no_problem() -> None:
    assert good_report().problems == []
    assert [each["from_disk"] for each in good_report().to_json()["passes"]] == [0, 0, 0, 6144]


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (changed(1, identical=15), "nothing stored: 1 of 16 answers differ"),
        (changed(2, computed=TOKENS, loaded=0), "stored: 26176 of 26176 prompt tokens were computed"),
        (changed(3, computed=2618, loaded=22_022), "after SIGKILL: 2618 of 26176 prompt tokens were computed"),
        (changed(3, from_disk=0), "after SIGKILL: nothing came from the disk tier"),
        (changed(2, loaded=100), "stored: the engine's counts do not add up"),
        (changed(0, errors=("HTTP 500: no [answer]",)), "no offload: HTTP 500: no [answer]"),
        (replace(good_report(), cache_usage=0.25), "still in use: 0.250"),
        (replace(good_report(), processes_left=2), "2 processes are left"),
    ],
)
def test_what_is_wrong_is_found_and_printed_as_it_is(
    report: OffloadReport, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [found for found in report.problems if problem in found]
    report.print(open_console())
    assert problem in " ".join(capsys.readouterr().out.split())


def test_a_transport_is_refused() -> None:
    result = CliRunner().invoke(app, ["demo", "--mode", "offload", "--transport", "cma"])
    assert "transport 'cma'" in str(result.exception)
