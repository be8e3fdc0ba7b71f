"""The pages of failures name tests that exist, a test for every failure that must have one, and every code."""

import ast
import re
from pathlib import Path

from kvferry.errors import Reason
from kvferry.integrations.vllm.failed_loads import status_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/failures-others-had.md").read_text()
REASONS = (ROOT / "docs/failures.md").read_text().partition("## Reason codes")[2].partition("\n## ")[0]
ISSUES = (
    *(52234, 24527, 850, 55776, 17665, 1983, 12779, 2433, 16662, 2933, 12313, 14142, 2899, 5431, 7236, 6325),
    *(3059, 3060, 3989, 39400, 3151, 2368, 10027, 84, 33, 46283, 53095, 32267),
)
"""Numbers of issues, pull requests and advisories whose tests are named after them."""


def named_tests() -> list[tuple[str, str]]:
    return re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)


def test_every_test_of_the_page_exists() -> None:
    assert len(named_tests()) > 30
    for path, name in named_tests():
        functions = {getattr(node, "name", "") for node in ast.parse((ROOT / path).read_text()).body}
        assert name in functions, f"{path} has no {name}"


def test_every_failure_has_a_test_that_is_named_after_it() -> None:
    numbers = {int(number) for _, name in named_tests() for number in re.findall(r"\d+", name)}
    assert not {*ISSUES} - numbers


def test_every_reason_is_explained_once_with_the_status_of_its_answer() -> None:
    explained = []
    for section in re.split(r"^### ", REASONS, flags=re.MULTILINE)[1:]:
        for codes in re.findall(r"^\* (`.*?`): ", section, re.MULTILINE):
            explained += [(code, int(section[:3])) for code in re.findall(r"`([a-z-]+)`", codes)]
    assert sorted(explained) == sorted((reason.value, status_of(reason).value) for reason in Reason)
