"""``python -m tests.timeline_picture FILE`` draws the first request of a page of ``kvferry timeline`` as PNG."""

import sys
import tempfile
from pathlib import Path

from kvferry.cli.timeline import timeline

from .support.browser import MISSING, find_browser, open_browser
from .support.transfer_logs import sample_lines, write_logs

BOTTOM = "document.querySelector('section').getBoundingClientRect().bottom + 16"


def main() -> int:
    """Write the picture; return 2 where no browser is here."""
    [_, picture] = sys.argv
    program = find_browser()
    if program is None:
        print(MISSING, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, open_browser(program) as browser:
        page = Path(folder) / "page.html"
        timeline([log.path for log in write_logs(Path(folder), sample_lines())], html=page)
        browser.open(page)
        Path(picture).write_bytes(browser.picture(browser.evaluate(BOTTOM)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
