"""Prints how large the house is: lines, settings, kinds of message, words, and the files of a first request.

The last one is measured by ``tests/adapter/test_files_of_a_request.py``, which runs here; without vLLM it is left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvferry.handoff import messages
from kvferry.integrations.vllm.settings import Settings

ROOT = Path(__file__).absolute().parent.parent
FILES_TEST = "tests/adapter/test_files_of_a_request.py"
FILES_VARIABLE = "KVFERRY_FILES_OF_A_REQUEST"


def count() -> dict[str, int]:
    """Return every count by its name."""
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return {
        "lines of src": sum(len(path.read_text().splitlines()) for path in (ROOT / "src").rglob("*.py")),
        "settings of KVFerryConnector": len(Settings.__struct_fields__),
        "kinds of message": len(kinds_of_message()),
        "words of docs": sum(len(path.read_text().split()) for path in documents),
        **{f"files of a first {flow} request": number for flow, number in files_of_requests().items()},
    }


def kinds_of_message() -> list[str]:
    """Return the tags of the messages that engines send to one another."""
    found = vars(messages).values()
    kinds = [kind for kind in found if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    return sorted(str(kind.__struct_config__.tag) for kind in kinds if kind.__struct_config__.tag is not None)


def files_of_requests() -> Mapping[str, int]:
    """Return for each flow of a router how many source files have a function that a first request runs."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "files.json"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", FILES_TEST]
        variables = {**os.environ, FILES_VARIABLE: str(found)}
        subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, check=False)
        return json.loads(found.read_text()) if found.exists() else {}


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    found = count()
    if parser.parse_args().json:
        print(json.dumps(found, indent=2))
        return
    for name, number in found.items():
        print(f"{number:7,} {name}")


if __name__ == "__main__":
    main()
