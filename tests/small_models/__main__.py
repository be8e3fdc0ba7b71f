"""``python -m tests.small_models --try NAME...``: does vLLM's CPU build run these small models? Without names, all.

``--write FOLDER`` only writes the models. ``--folder`` keeps the models and the engines' logs.
"""

import argparse
import tempfile
from pathlib import Path

from .trial import try_models
from .weights import names, write_small_model


def main() -> None:
    """Try or write the models that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.small_models", description=__doc__)
    parser.add_argument("--try", dest="tried", nargs="*", metavar="NAME", help="try these models, or all")
    parser.add_argument("--write", nargs="*", metavar="NAME", help="write these models, or all")
    parser.add_argument("--folder", type=Path, help="a folder that is kept (default: a temporary one)")
    given = parser.parse_args()
    if given.tried is None and given.write is None:
        parser.error("give --try or --write")
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        for name in [] if given.write is None else given.write or names():
            print(write_small_model(name, folder))
        if given.tried is not None:
            folder.mkdir(parents=True, exist_ok=True)
            try_models(given.tried or names(), folder)


if __name__ == "__main__":
    main()
