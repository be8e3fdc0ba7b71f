"""``kvferry check`` of a pair of engines: the phases of its prompt are those of the transfer log."""

import json

import pytest
from typer.testing import CliRunner

from kvferry.cli.check import WORKS
from kvferry.cli.main import app
from kvferry.cli.transfer_records import PHASES

from .engine_pool import EnginePool
from .handoffs import Pair

pytestmark = pytest.mark.vllm

PAIR = Pair("checked", "gqa-tp1-next", "gqa-tp1")


@pytest.mark.engines(PAIR.prefill, PAIR.decode)
def test_the_pair_works_and_each_phase_has_its_time_and_transport(engine_pool: EnginePool) -> None:
    prefill, decode = (engine_pool.running[name] for name in (PAIR.prefill, PAIR.decode))
    num_before = len(decode.loads())
    ran = CliRunner().invoke(app, ["check", prefill.server.url, decode.server.url, "--json"])
    assert ran.exit_code == WORKS, ran.output
    found = json.loads(ran.stdout)
    assert found["route"]["transport"] == "cma"
    [sent] = found["prompts"]
    assert (sent["received_tokens"], sent["transports"]) == (sent["prompt_tokens"], ["cma"])
    [load] = decode.loads()[num_before:]
    rows = [row for row in sent["times"] if row["phase"]]
    assert [(row["phase"], row["transport"]) for row in rows] == [(phase, "cma") for phase in PHASES]
    seconds = [max(0.0, load["phases"][phase]) for phase in PHASES]
    assert [row["milliseconds"] for row in rows] == pytest.approx([1e3 * each for each in seconds], abs=1e-3)
    others = {
        row["what"]: row["milliseconds"] for row in sent["times"] if not row["phase"] and row["where"] == "decode"
    }
    assert others["comparing digests"] == pytest.approx(1e3 * load["compare_seconds"], abs=1e-3)
    assert others["wait for the cache"] == pytest.approx(1e3 * load["wait_seconds"], abs=1e-3)
