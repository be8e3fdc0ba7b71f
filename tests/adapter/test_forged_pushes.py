"""Pushes whose transfer, prompt or engine a client has chosen: refused with a reason, and not a byte is written."""

import msgspec
import pytest

pytest.importorskip("vllm")

from kvferry.handoff.source import END, BlockList, Prompt
from kvferry.integrations.vllm.step import PromptLoad, AnnouncedPrompt, StepMetadata

from ..local.engines_in_process import BLOCK_SIZE, whole_blocks
from . import test_vllm_push_workers as shared
from .test_vllm_push_workers import SOURCE_IDS, TARGET_IDS, Workers, arrived

workers = shared.workers
NUM_TOKENS = 3 * BLOCK_SIZE
OURS, THEIRS = "prompt", "another prompt"


def announce(workers: Workers, transfer_id: str, num_tokens: int, digest: str, seconds: float = 20.0) -> None:
    """Order a load whose parameters are forged; the digest is that of the decode engine's own prompt."""
    blocks = (whole_blocks("full", [0] * 3, TARGET_IDS),)
    pushed = AnnouncedPrompt(transfer_id, num_tokens, digest)
    order = PromptLoad("r", seconds, workers.hold, None, num_tokens, blocks, pushed=pushed)
    workers.step([workers.receiver], StepMetadata(loads=[order]))


def compute_both(workers: Workers) -> None:
    """The prefill engine computes two prompts, each of its own transfer."""
    prompts = [
        ("x", Prompt(NUM_TOKENS, OURS, {"full": BlockList(0, SOURCE_IDS)}, END)),
        ("y", Prompt(NUM_TOKENS, THEIRS, {"full": BlockList(0, SOURCE_IDS[::-1])}, END)),
    ]
    workers.step(workers.senders, StepMetadata(prompts=prompts))


@pytest.mark.parametrize("is_announced_first", [False, True])
@pytest.mark.parametrize(
    ("transfer_id", "num_tokens", "digest"),
    [("y", NUM_TOKENS, OURS), ("x", NUM_TOKENS, THEIRS), ("x", NUM_TOKENS - 1, OURS)],
    ids=["another request's transfer", "another prompt", "a shorter prompt"],
)
def test_a_transfer_of_another_prompt_writes_nothing(
    transfer_id: str,
    num_tokens: int,
    digest: str,
    is_announced_first: bool,
    workers: Workers,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not is_announced_first:
        compute_both(workers)
    announce(workers, transfer_id, num_tokens, digest)
    if is_announced_first:
        compute_both(workers)
    assert workers.finished() == ({"r"}, {"r"})
    assert "another prompt here" in caplog.text
    assert "[invalid-request]" in caplog.text
    assert not workers.target.cache.any()


def test_a_transfer_that_nobody_has_ends_by_its_deadline(workers: Workers, caplog: pytest.LogCaptureFixture) -> None:
    announce(workers, "z", NUM_TOKENS, OURS, seconds=0.3)
    compute_both(workers)
    assert workers.finished() == ({"r"}, {"r"})
    assert "[deadline-exceeded]" in caplog.text
    assert not workers.target.cache.any()


def test_another_epoch_of_the_engine_is_refused(workers: Workers, caplog: pytest.LogCaptureFixture) -> None:
    workers.hold = msgspec.structs.replace(workers.hold, epoch=workers.hold.epoch + 1)
    compute_both(workers)
    announce(workers, "x", NUM_TOKENS, OURS)
    assert workers.finished() == ({"r"}, {"r"})
    assert "[peer-changed]" in caplog.text
    assert not workers.target.cache.any()


def test_the_right_transfer_of_the_two_is_pushed(workers: Workers) -> None:
    """The control."""
    compute_both(workers)
    announce(workers, "x", NUM_TOKENS, OURS)
    assert workers.finished() == ({"r"}, set())
    assert arrived(workers)
