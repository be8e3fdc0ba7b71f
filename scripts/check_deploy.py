"""Validates docs/deploy: the Compose file and the Kubernetes manifests by their schemas, the units by systemd.

The schemas come from packages, which pip installs into build/deploy-environment. Exit status 1 says that a file is not
valid, 2 that something to validate with is missing.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from environments import make_environment

ROOT = Path(__file__).absolute().parent.parent
DEPLOY = ROOT / "docs" / "deploy"
ENVIRONMENT = ROOT / "build" / "deploy-environment"
PACKAGES = ("kubernetes-validate==1.37.0", "check-jsonschema==0.39.0")
SYSTEMD = "systemd-analyze"


def main() -> int:
    """Return 1 where a file is not valid, 2 where something to validate with is missing."""
    try:
        programs = make_environment(sys.executable, ENVIRONMENT, PACKAGES)
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(error.cmd)} has failed", file=sys.stderr)
        return 2
    manifests = sorted(map(str, (DEPLOY / "kubernetes").glob("*.yaml")))
    compose = str(DEPLOY / "compose.yaml")
    commands = [[str(programs / "kubernetes-validate"), "--strict", each] for each in manifests]
    commands.append([str(programs / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", compose])
    status = max(subprocess.run(command, check=False).returncode for command in commands)
    if shutil.which(SYSTEMD) is None:
        print(f"{SYSTEMD} is missing (Debian: the package systemd): the units were not verified", file=sys.stderr)
        return 2
    return int(bool(status or verify_units()))


def verify_units() -> int:
    """Return systemd's verdict on the units, whose programs and files are replaced by some that exist here."""
    with tempfile.TemporaryDirectory() as folder:
        units = []
        for unit in sorted((DEPLOY / "systemd").glob("*.service")):
            text = re.sub(r"/opt/vllm/bin/\w[\w-]*", sys.executable, unit.read_text())
            text = text.replace("/etc/kvferry/", f"{DEPLOY / 'systemd'}/")
            units.append(Path(folder) / unit.name)
            units[-1].write_text(text)
        status = subprocess.run([SYSTEMD, "verify", "--man=no", *map(str, units)], check=False).returncode
    print(f"{len(units)} units: systemd's verdict is {status}")
    return status


if __name__ == "__main__":
    sys.exit(main())
