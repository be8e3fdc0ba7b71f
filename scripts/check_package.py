"""Installs the built wheel as a user does, without the clone, and tries what the README promises.

By default: alone, on each supported Python, of which the interpreters are found on PATH and below ~/.pyenv:
``kvferry --help``, ``plan``, ``keys`` and ``settings`` work; ``doctor``, ``demo`` and ``tiers`` say what is missing,
and pip finds each package that any hint of kvferry says to install.
With --vllm: a folder with the wheel alone, in which the README's lines for a CPU run, from an environment to the answer
to a chat request, and end at the first one that fails. A model of random weights takes the place of the one named,
and what else is not as it stands is printed. Exit status 1 says that something failed, 2 that a Python is missing.
"""

import argparse
import ast
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from environments import make_environment
from package import ROOT, build

from kvferry.harness.launch import prompt_tokens, scrape_metrics
from kvferry.harness.tiny_models import make_tiny_model

PYTHONS = ("3.11", "3.12", "3.13")
CONFIG = ROOT / "tests" / "model_configs" / "Llama-3.1-8B-Instruct.json"
README_SECTION = "## With your own vLLM"
README_MODEL = "Qwen/Qwen3-0.6B"
README_INDEX = "--extra-index-url=https://download.pytorch.org/whl/cpu "
README_SECONDS = 1500
DECODE_URL = "http://127.0.0.1:8200"
ALONE_ENVIRONMENT = {**os.environ, "PYTHONPATH": "", "COLUMNS": "160"}
"""Without the clone."""
# Arguments, the exit status, and what the output says.
ALONE: tuple[tuple[tuple[str, ...], int, str], ...] = (
    (("--help",), 0, "plan"),
    (("--version",), 0, "kvferry"),
    (("plan", "--model", str(CONFIG), "--prefill", "tp=2", "--json"), 0, '"verified": true'),
    (("keys", "new", "keys"), 0, "SHA-256"),
    (("settings",), 0, "transport"),
    (("doctor", "--json"), 1, "vLLM is not installed"),
    (("doctor", "--kernels"), 2, "which is not installed"),
    (("demo", "--prompts", "2"), 2, "which is not installed"),
    (("tiers", "show", "folder"), 2, "pip install xxhash=="),
)


class Failed(Exception):
    """Something that the README promises does not work; the text says what."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 where a promise does not hold, 2 where an interpreter is missing."""
    parser = argparse.ArgumentParser(prog="check_package", description=__doc__)
    parser.add_argument("--vllm", action="store_true", help="the README's lines beside vLLM, instead of kvferry alone")
    options = parser.parse_args(arguments)
    interpreters = {version: find_python(version) for version in PYTHONS}
    missing = [] if options.vllm else [version for version, path in interpreters.items() if path is None]
    with tempfile.TemporaryDirectory(prefix="kvferry-check-") as folder:
        scratch = Path(folder)
        wheel = build(scratch / "dist")[1]
        try:
            if options.vllm:
                check_readme(wheel, scratch)
            for version, python in interpreters.items():
                if python is not None and not options.vllm:
                    check_alone(version, python, wheel, scratch / version)
        except Failed as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
    for version in missing:
        print(f"Python {version} was not found: nothing was tried on it", file=sys.stderr)
    return 2 if missing else 0


def find_python(version: str) -> str | None:
    """Return an interpreter of this version; None where there is none."""
    candidates = [shutil.which(f"python{version}"), "/usr/bin/python3"]
    candidates += map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))
    program = f"import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
    for candidate in filter(None, candidates):
        if subprocess.run([candidate, "-c", program], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def install(python: str, folder: Path, *requirements: str) -> Path:
    """Make an environment with these packages; return its folder of programs. Raises :class:`Failed`."""
    lists = (each.split() for each in requirements)
    try:
        return make_environment(python, folder / "environment", *lists, variables=ALONE_ENVIRONMENT)
    except subprocess.CalledProcessError as error:
        raise Failed(" ".join(error.cmd)) from None


def check_alone(version: str, python: str, wheel: Path, folder: Path) -> None:
    """Try the commands with nothing but kvferry installed. Raises :class:`Failed`."""
    folder.mkdir()
    programs = install(python, folder, str(wheel))
    for arguments, status, told in ALONE:
        ran = subprocess.run(
            [str(programs / "kvferry"), *arguments], cwd=folder, capture_output=True, text=True, check=False,
            env=ALONE_ENVIRONMENT,
        )  # fmt: skip
        output = ran.stdout + ran.stderr
        if ran.returncode != status or told not in output or "Traceback" in output:
            raise Failed(f"Python {version}: kvferry {' '.join(arguments)}: exit status {ran.returncode}\n{output}")
    program = "import sys; from kvferry.errors import install_command; print(install_command(*sys.argv[1:]))"
    commands = [[str(programs / "python"), "-c", program, *packages] for packages in hinted_packages()]
    hints = {subprocess.check_output(each, text=True, env=ALONE_ENVIRONMENT).strip() for each in commands}
    for hint in sorted(hints):
        check_hint(hint, programs)
    print(f"Python {version}: {len(ALONE)} commands as promised with kvferry alone, and {len(hints)} hints", flush=True)


def hinted_packages() -> list[list[str]]:
    """Return the packages of every hint to install something in kvferry's sources, seldom seen ones included."""
    sources = (path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    nodes = [node for text in sources if "install_command" in text for node in ast.walk(ast.parse(text))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "install_command"]
    return [[ast.literal_eval(argument) for argument in call.args] for call in calls]


def check_hint(hint: str, programs: Path) -> None:
    """Let pip resolve a command that kvferry told; it installs nothing. Raises :class:`Failed`."""
    dry = ("--dry-run", "--no-deps", "--disable-pip-version-check", "--progress-bar", "off")
    command = [str(programs / "python"), "-m", *shlex.split(hint), *dry]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=ALONE_ENVIRONMENT)
    if ran.returncode or hint.count("==") != hint.count(" ") - 1:
        raise Failed(f"{hint}\n{ran.stdout}{ran.stderr}")


def check_readme(wheel: Path, folder: Path) -> None:
    """Run the README's lines for a CPU in a folder with the wheel alone. Raises :class:`Failed`."""
    model = make_tiny_model("qwen3-tiny", folder)
    add_tokenizer(model)
    lines = readme_lines().replace(README_MODEL, str(model))
    print(f"{README_MODEL}: random weights in {model} take its place", flush=True)
    if not is_reachable("download.pytorch.org"):
        # Where pip finds builds of torchvision for CUDA only, vLLM does not start with one as it is.
        mend = f"python {shlex.quote(str(ROOT / 'scripts' / 'mend_torchvision.py'))}"
        lines = re.sub(r"(?m)^(pip install .*)", rf"\g<1>\n{mend}", lines.replace(README_INDEX, ""))
        print(f"{README_INDEX.strip()}: not reachable, so pip's other indexes serve; then {mend}", flush=True)
    empty = folder / "empty"
    empty.mkdir()
    shutil.copy(wheel, empty)
    with (folder / "log").open("wb") as log:
        shell = subprocess.Popen(
            ["/bin/bash", "-c", lines], cwd=empty, env=ALONE_ENVIRONMENT,
            stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            check_answer(shell, folder / "log")
        finally:
            os.killpg(shell.pid, signal.SIGTERM)
            shell.wait(60)


def is_reachable(host: str) -> bool:
    """Return whether a host has a name here and answers at the port of HTTPS."""
    try:
        socket.create_connection((host, 443), timeout=10).close()
    except OSError:
        return False
    return True


def readme_lines() -> str:
    """Return the README's lines for a CPU: an environment, two engines, a router, a check and a chat request.

    The answer to the request alone goes to standard output, all else to standard error. A line that fails is the last
    one, an engine or a router that ends with an error too.
    """
    section = (ROOT / "README.md").read_text().split(README_SECTION, 1)[1].split("\n## ", 1)[0]
    blocks = [block.split("```", 1)[0] for block in section.split("**on a CPU**", 1)[1].split("```sh\n")[1:]]
    trap = "trap 'echo \"this line failed: $BASH_COMMAND\"' ERR\n"
    lines = "".join(blocks).rstrip("\n").replace(" &\n", " || { echo an engine or the router has ended; kill $$; } &\n")
    return f"set -eE\nexec 3>&1 1>&2\n{trap}{lines} >&3\n"


def check_answer(shell: "subprocess.Popen[bytes]", log: Path) -> None:
    """Read the answer of the last line, and ask the decode engine what it received. Raises :class:`Failed`."""
    assert shell.stdout is not None
    line = b""
    try:
        status = shell.wait(README_SECONDS)
        os.set_blocking(shell.stdout.fileno(), False)
        line = shell.stdout.read() or b""
        if status:
            raise ValueError(f"exit status {status}")
        answer = json.loads(line)
        received = prompt_tokens(scrape_metrics(DECODE_URL)).received
    except (subprocess.TimeoutExpired, OSError, ValueError) as error:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise Failed(f"the README's lines: {error}; the answer: {line!r}; the log ends:\n{end}") from None
    if not answer.get("choices") or received < 1:
        raise Failed(f"the README's lines: {received} tokens received; the answer: {answer}")
    print(f"the README's lines: an answer, for which the decode engine received {received} tokens", flush=True)


def add_tokenizer(model: Path) -> None:
    """Give a model without a tokenizer one whose tokens are bytes, and a chat template that adds none."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(model / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    sys.exit(main())
