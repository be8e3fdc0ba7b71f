"""``make check-vllm`` on the sources of the installed vLLM: they pass, and a copy with one renamed name fails."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvferry.integrations.vllm.names import checker
from kvferry.integrations.vllm.versions import installed_version

from ..pure.test_check_vllm import SCRIPT, script
from .vllm_copies import FOLDER, changed_copy, parsed_once

__all__ = ["script"]

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"
ATTENTION = "vllm.model_executor.layers.attention.attention"
# Module, the text and the one in its place, the name in the list.
RENAMED = {
    "a method that kvferry calls": ("vllm.v1.core.block_pool", "def touch(", "def keep(", "BlockPool.touch"),
    "a method that vLLM calls": (CONNECTOR, "def reset_cache(", "def drop_cache(", "KVConnectorBase_V1.reset_cache"),
    "a buffer of a layer": (ATTENTION, '"_k_scale"', '"_scale_of_k"', "set_default_quant_scales._k_scale"),
    "a number of a layer": (
        ATTENTION,
        "layer._v_scale_float",
        "layer._scale_of_v",
        "set_default_quant_scales._v_scale_float",
    ),
}


def arguments(folder: Path | None, names: Path) -> list[str]:
    return [installed_version().partition("+")[0], "--folder", str(folder), "--names", str(names), "--json"]


def breaks(output: str) -> list[str]:
    """Return the names that the check says kvferry cannot use."""
    return [each["name"] for each in json.loads(output)["changes"] if each["kind"] == "breaks"]


def test_the_installed_release_passes_and_its_file_is_written(tmp_path: Path) -> None:
    """The same as the file that kvferry has of it."""
    run = subprocess.run([sys.executable, SCRIPT, *arguments(FOLDER, tmp_path)], capture_output=True, text=True)
    assert (run.returncode, breaks(run.stdout)) == (0, []), run.stderr
    [release] = checker.known_releases(tmp_path)
    if release in checker.known_releases():
        written = (tmp_path / f"{release}.json").read_text()
        assert written == (checker.FOLDER / f"{release}.json").read_text(), "write it again: make check-vllm"


@pytest.mark.parametrize("case", RENAMED)
def test_a_copy_with_one_renamed_name_fails_and_is_told_which(
    script: ModuleType,
    tmp_path: Path,
    case: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(checker, "parsed", parsed_once)
    module, old, new, name = RENAMED[case]
    status = script.main(arguments(changed_copy(tmp_path / "copy", module, old, new), tmp_path))
    assert (status, breaks(capsys.readouterr().out)) == (1, [f"{module}.{name}"])
    assert checker.known_releases(tmp_path) == []
