"""Failures that others had with vLLM's scheduler; the others are in ``tests/pure`` and ``tests/local``."""

from typing import Any

import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.harness.launch import free_port

from .scheduler_requests import FULL, PROMPT, run_prefill


def test_vllm_ascend_5960_data_parallel_ranks_name_their_own_ports(make_role: Any) -> None:
    """vllm-ascend#5960: a port that the settings name is that of rank 0; the others' come with the answers."""
    port = free_port()
    ranks = [make_role(FULL, port=port, dp_rank=rank) for rank in range(2)]
    answers = [run_prefill(rank, PROMPT, [5, 4, 3, 2, 1]) or {} for rank in ranks]
    assert [answer["remote_port"] for answer in answers] == [port, port + 1]
    assert [answer["remote_engine_id"] for answer in answers] == ["engine-0", "engine-1"]
    with pytest.raises(HandoffError) as taken:
        make_role(FULL, port=port, dp_rank=1)
    assert taken.value.reason is Reason.PORT_IN_USE
    assert str(port + 1) in str(taken.value)
    free = [run_prefill(make_role(FULL, dp_rank=rank), PROMPT, [5, 4, 3, 2, 1]) or {} for rank in range(2)]
    assert len({answer["remote_port"] for answer in free}) == 2
