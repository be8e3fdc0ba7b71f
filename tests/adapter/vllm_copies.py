"""Copies of the installed vLLM's sources of which one module is changed."""

from functools import cache
from pathlib import Path

from kvferry.integrations.vllm import versions
from kvferry.integrations.vllm.names import checker

FOLDER = versions._installed_folder()
"""The folder that has the installed ``vllm/``."""
assert FOLDER is not None, "vLLM is not installed"
parsed_once = cache(checker.parsed)
"""In the place of ``checker.parsed``: copies have nearly all files in common, and to parse them takes two seconds."""


def changed_copy(folder: Path, module: str, old: str, new: str) -> Path:
    """Return a folder with the installed vLLM, of which one module is changed; all else are links."""
    assert FOLDER is not None
    source, place = FOLDER, folder
    for part in module.split("."):
        place.mkdir(parents=True, exist_ok=True)
        source = source / part
        for sibling in source.parent.iterdir() if part != "vllm" else ():
            if sibling.name not in (part, f"{part}.py", "__pycache__"):
                (place / sibling.name).symlink_to(sibling)
        place = place / part
    text = source.with_suffix(".py").read_text()
    assert old in text
    place.with_suffix(".py").write_text(text.replace(old, new))
    return folder
