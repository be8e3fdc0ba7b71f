"""Chromium without a window: what a person would see of a page, what the page says, and what it asks for.

The browser reads the commands of its DevTools protocol from its file 3 and answers on its file 4: JSON, ended by a zero
byte. Nothing that a page asks for leaves this machine: no name is resolved.
"""

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "google-chrome")
MISSING = "no browser is here: install the package chromium (Debian: sudo apt-get install chromium)"
OPTIONS = (
    "--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-sync",
    "--disable-breakpad", "--hide-scrollbars", "--force-color-profile=srgb", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
SECONDS = 60.0
"""For which an answer is awaited."""
WIDTH, HEIGHT = 1100, 2000
"""Of the window, in pixels: a page that is no longer needs no scrolling."""
PAINTED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


class Browser:
    """One page of a browser.

    ``messages`` are those of the console, with errors and refusals of the page's policy; ``requests`` are the addresses
    that the page has asked for, its own included; both of the page that was opened last.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._commands, self._answers, self._unread = commands, answers, b""
        self._number, self._is_loaded = 0, False
        self._session: dict[str, str] = {}
        page = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        size = {"width": WIDTH, "height": HEIGHT}
        self._call("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)

    def open(self, page: Path) -> None:
        """Show a page, and wait until it is painted."""
        self._call("Page.navigate", url="about:blank")
        self.evaluate(PAINTED)
        self.messages.clear()
        self.requests.clear()
        self._is_loaded = False
        self._call("Page.navigate", url=page.absolute().as_uri())
        deadline = time.monotonic() + SECONDS
        while not self._is_loaded:
            self._note(self._read(deadline))
        self.evaluate(PAINTED)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript, awaited. Raises ``RuntimeError`` with its exception."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press a key, by its name and Windows' number of it, and wait until the page is painted again."""
        for kind in ("rawKeyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)
        self.evaluate(PAINTED)

    def picture(self, height: float) -> bytes:
        """Return the upper part of the page as PNG."""
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
        return base64.b64decode(self._call("Page.captureScreenshot", format="png", clip=clip)["data"])

    def close(self) -> None:
        """End the browser."""
        self._session = {}
        self._call("Browser.close")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        self._send({"id": number, "method": method, "params": parameters} | self._session)
        deadline = time.monotonic() + SECONDS
        while (message := self._read(deadline)).get("id") != number:
            self._note(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return dict(message["result"])

    def _send(self, message: dict[str, Any]) -> None:
        os.write(self._commands, json.dumps(message).encode() + b"\0")

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            if not select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"the browser has not answered in {SECONDS:g} s")
            piece = os.read(self._answers, 1 << 20)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._unread += piece
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        about = event.get("params", {})
        match event.get("method"):
            case "Page.loadEventFired":
                self._is_loaded = True
            case "Page.javascriptDialogOpening":
                self.messages.append(about["message"])
                # Until it is closed the page answers nothing.
                self._send(
                    {"id": 0, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}} | self._session
                )
            case "Runtime.consoleAPICalled":
                self.messages += [str(each.get("value", each.get("description"))) for each in about["args"]]
            case "Runtime.exceptionThrown":
                self.messages.append(str(about["exceptionDetails"]))
            case "Log.entryAdded":
                self.messages.append(about["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])


def find_browser() -> str | None:
    """Return the program; None where there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


@contextmanager
def open_browser(program: str) -> Iterator[Browser]:
    """Start the browser, with a profile of its own, and end it and all its processes."""
    with tempfile.TemporaryDirectory(prefix="kvferry-browser-", ignore_cleanup_errors=True) as folder:
        (commands_out, commands), (answers, answers_in) = os.pipe(), os.pipe()
        log = Path(folder) / "log"
        # A sandbox needs another user than root.
        options = [*OPTIONS, *(["--no-sandbox"] if os.geteuid() == 0 else []), f"--user-data-dir={folder}/profile"]
        shell = f'exec "$@" 3<&{commands_out} 4>&{answers_in}'
        with log.open("wb") as errors:
            process = subprocess.Popen(
                ["bash", "-c", shell, "bash", program, *options], pass_fds=(commands_out, answers_in),
                env={**os.environ, "HOME": folder}, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
            )  # fmt: skip
        os.close(commands_out)
        os.close(answers_in)
        try:
            browser = Browser(commands, answers)
            yield browser
            browser.close()
            process.wait(10.0)
        except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
            error.add_note(f"the browser's log ends: {log.read_text(errors='replace')[-2000:]}")
            raise
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10.0)
            os.close(commands)
            os.close(answers)
