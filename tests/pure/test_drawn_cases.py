"""What the random cases cover, counted: a property says nothing about what is never drawn.

``python -m tests.pure.test_drawn_cases 4000`` prints the shares.
"""

import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from kvferry.layout.shard import Atom, CacheGroup, CacheKind, Component, Shard
from kvferry.plan.match import GroupBlocks

from .strategies import Move, moves

SHARES = {
    "attention": 40,
    "mla": 38,
    "sliding window": 38,
    "state": 44,
    "kinds mixed": 49,
    "mamba1": 15,
    "mamba2, one group": 10,
    "mamba2, groups": 12,
    "gated delta": 12,
    "state of unequal tensor parallelism": 24,
    "convolution in another order": 21,
    "more sources than destinations": 24,
    "fewer sources than destinations": 30,
    "replicated heads at the source": 10,
    "replicated heads at the destination": 11,
    "replicas of a latent": 13,
    "stages at the source": 40,
    "stages at the destination": 38,
    "stages on both sides": 22,
    "token shares at the source": 38,
    "token shares at the destination": 36,
    "token shares in unequal numbers": 4,
    "token shares by several tokens": 29,
    "interleaves differ": 9,
    "larger blocks at the source": 18,
    "larger blocks at the destination": 19,
    "block sizes without a ratio": 20,
    "packed pages": 28,
    "unequal widths": 54,
    "unequal item sizes": 24,
    "prefix hit": 20,
    "first token within a block on both sides": 14,
    "lists that begin elsewhere": 21,
    "window clipped at the source": 12,
    "window clipped at the destination": 13,
    "look-ahead blocks at the source": 29,
    "look-ahead blocks at the destination": 34,
    "last block partly filled": 61,
    "several blocks": 47,
    "padded pages of states": 21,
}
"""Percent of 4000 drawn cases. A quarter of it is required of a sample."""


def features(move: Move) -> set[str]:
    """Return what is special about a case."""
    found = set(_of_engines(move.sources, move.destinations))
    kinds = set()
    for blocks in move.requests:
        sent, received = (_group(ranks, blocks.group) for ranks in (move.sources, move.destinations))
        kinds.add(sent.kind)
        found |= set(_of_group(sent, received, *(_tp_size(ranks) for ranks in (move.sources, move.destinations))))
        if blocks.num_tokens and sent.kind is not CacheKind.STATE:
            found |= set(_of_tokens(sent, received)) | set(_of_request(blocks, sent, received))
    return found | ({"kinds mixed"} if len(kinds) > 1 else set())


def _group(ranks: tuple[Shard, ...], name: str) -> CacheGroup:
    return next(group for rank in ranks if (group := rank.group(name)))


def _tp_size(ranks: tuple[Shard, ...]) -> int:
    return ranks[0].tp_size // max(group.token_share.size for rank in ranks for group in rank.groups)


def _named(**features: bool) -> Iterator[str]:
    yield from (name for name, there in features.items() if there)


def _of_engines(sources: tuple[Shard, ...], destinations: tuple[Shard, ...]) -> Iterator[str]:
    sent, received = _tp_size(sources), _tp_size(destinations)
    stages = sources[0].pp_size > 1, destinations[0].pp_size > 1
    yield from _named(
        **{
            "more sources than destinations": sent > received,
            "fewer sources than destinations": sent < received,
            "stages at the source": stages[0],
            "stages at the destination": stages[1],
            "stages on both sides": all(stages),
        }
    )


def _of_group(sent: CacheGroup, received: CacheGroup, sent_tp: int, received_tp: int) -> Iterator[str]:
    yield sent.kind.value.replace("-", " ")
    parts = sent.components
    if sent.kind is CacheKind.STATE:
        yield _family(parts)
        orders = {part.head_stride < part.channel_stride for part in (parts[0], received.components[0])}
        yield from _named(
            **{
                "state of unequal tensor parallelism": sent_tp != received_tp,
                "convolution in another order": len(orders) > 1,
                "padded pages of states": any(part.is_padding for part in parts),
            }
        )
        return
    heads, is_latent = parts[0].total_heads, sent.kind is CacheKind.MLA
    yield from _named(
        **{
            "replicas of a latent": is_latent and sent_tp > 1,
            "replicated heads at the source": not is_latent and sent_tp > heads,
            "replicated heads at the destination": not is_latent and received_tp > heads,
            "packed pages": parts[0].atom is Atom.PAGE,
            "unequal widths": len({part.num_channels for part in parts}) > 1,
            "unequal item sizes": len({part.itemsize for part in parts}) > 1,
        }
    )


def _family(parts: tuple[Component, ...]) -> str:
    totals = {part.name: part.total_heads for part in parts}
    if "conv.q" in totals:
        return "gated delta"
    if "conv.B" not in totals:
        return "mamba1"
    return "mamba2, one group" if totals["conv.B"] == 3 else "mamba2, groups"


def _of_tokens(sent: CacheGroup, received: CacheGroup) -> Iterator[str]:
    shares, sizes = (sent.token_share, received.token_share), (sent.block_size, received.block_size)
    both = all(share.size > 1 for share in shares)
    yield from _named(
        **{
            "token shares at the source": shares[0].size > 1,
            "token shares at the destination": shares[1].size > 1,
            "token shares in unequal numbers": both and shares[0].size != shares[1].size,
            "token shares by several tokens": max(share.interleave for share in shares) > 1,
            "interleaves differ": both and shares[0].interleave != shares[1].interleave,
            "larger blocks at the source": sizes[0] > sizes[1] and sizes[0] % sizes[1] == 0,
            "larger blocks at the destination": sizes[1] > sizes[0] and sizes[1] % sizes[0] == 0,
            "block sizes without a ratio": max(sizes) % min(sizes) > 0,
        }
    )


def _of_request(blocks: GroupBlocks, sent: CacheGroup, received: CacheGroup) -> Iterator[str]:
    covers = sent.tokens_per_position, received.tokens_per_position
    begins = blocks.source_first_token, blocks.destination_first_token
    lists = blocks.source_ids, blocks.destination_ids
    needed = [-(-(blocks.last_token - begin) // cover) for begin, cover in zip(begins, covers, strict=True)]
    slides = sent.kind is CacheKind.SLIDING_WINDOW
    yield from _named(
        **{
            "prefix hit": blocks.first_token > 0 and not slides,
            "first token within a block on both sides": all(blocks.first_token % cover for cover in covers),
            "lists that begin elsewhere": begins[0] != begins[1],
            "window clipped at the source": slides and lists[0][0] == 0,
            "window clipped at the destination": slides and lists[1][0] == 0,
            "look-ahead blocks at the source": len(lists[0]) > needed[0],
            "look-ahead blocks at the destination": len(lists[1]) > needed[1],
            "last block partly filled": (blocks.last_token - begins[1]) % covers[1] > 0,
            "several blocks": needed[1] > 1,
        }
    )


def shares(num_cases: int) -> dict[str, float]:
    """Draw so many cases, the same in every run, and return how many percent of them have each feature."""
    counts = Counter[str]()

    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(moves())
    def count(move: Move) -> None:
        counts.update(features(move) | {"case"})

    count()
    return {name: 100 * number / counts["case"] for name, number in counts.items() if name != "case"}


@pytest.fixture(scope="module")
def drawn() -> dict[str, float]:
    return shares(300)


@pytest.mark.parametrize("feature", SHARES)
def test_every_feature_is_drawn_often_enough(feature: str, drawn: dict[str, float]) -> None:
    assert drawn.get(feature, 0) >= SHARES[feature] / 4


def test_every_feature_has_a_share(drawn: dict[str, float]) -> None:
    assert set(drawn) <= set(SHARES)


if __name__ == "__main__":
    for name, share in sorted(shares(int(sys.argv[1])).items()):
        print(f"{share:5.1f} %  {name}")
