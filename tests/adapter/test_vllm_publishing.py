"""The published facts of an engine: its address, its ranks, and its model."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.quantization import QuantizationConfigArgs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from kvferry.errors import HandoffError, KVFerryError, Reason, TransportError
from kvferry.execution.executor import JobResult
from kvferry.integrations.vllm.connector import KVFerryConnector
from kvferry.integrations.vllm.identity import identity_of, record_models
from kvferry.integrations.vllm.scheduler import role as scheduler_role
from kvferry.integrations.vllm.settings import Settings
from kvferry.integrations.vllm.step import RankMetadata
from kvferry.integrations.vllm.worker.role import WorkerRole

from .scheduler_requests import A_RANK, FULL, IDENTITY, PROMPT, run_prefill


def test_answers_name_the_host_at_which_peers_reach_the_engine(make_role: Any) -> None:
    for settings, host in (({}, "127.0.0.1"), ({"host": "0.0.0.0", "advertised_host": "prefill-0"}, "prefill-0")):
        role = make_role(FULL, **settings)
        answer = run_prefill(role, PROMPT, [5, 4, 3, 2, 1])
        assert answer is not None
        assert (answer["remote_host"], answer["remote_port"]) == (host, role._server.port)


def rank_of(shard: bytes, **found: Any) -> RankMetadata:
    """Return what a rank tells its engine, which differs from the scheduler's identity in what the rank ``found``."""
    identity = msgspec.structs.replace(IDENTITY, **found)
    return RankMetadata(msgspec.msgpack.encode(msgspec.structs.replace(A_RANK, shard=shard)), identity)


def test_an_engine_with_a_silent_rank_does_not_start(make_role: Any) -> None:
    """Below MultiConnector vLLM hands the first connector's words to all: nobody would find a rank of ours."""
    connector: Any = KVFerryConnector.__new__(KVFerryConnector)
    connector._scheduler = make_role(FULL)
    for foreign in ({}, {(0, 0): KVConnectorHandshakeMetadata()}):
        with pytest.raises(HandoffError, match="0 of the 1 ranks") as refusal:
            connector.set_xfer_handshake_metadata_pp_aware(foreign)
        assert refusal.value.reason is Reason.MISSING_SOURCE
        assert "MultiConnector" in refusal.value.remedy
    with pytest.raises(HandoffError, match="a message has at most") as refusal:
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): rank_of(bytes(16 << 20))})
    assert refusal.value.reason is Reason.UNSUPPORTED
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): rank_of(b"")})


def test_an_engine_whose_ranks_serve_something_else_does_not_start(make_role: Any) -> None:
    """A host with other weights under the same name: peers would compare the scheduler's, and load the rank's."""
    connector: Any = KVFerryConnector.__new__(KVFerryConnector)
    connector._scheduler = make_role(FULL, num_ranks=2)
    ranks = {(0, 0): rank_of(b""), (0, 1): rank_of(b"", weights="others")}
    said = f"rank 1 does not serve .*: weights: its scheduler has {IDENTITY.weights!r}, the rank has 'others'"
    with pytest.raises(HandoffError, match=said) as refusal:
        connector.set_xfer_handshake_metadata_pp_aware(ranks)
    assert refusal.value.reason is Reason.MODEL_MISMATCH


@pytest.mark.parametrize(
    ("settings", "transports", "line"),
    [
        ({"kv_role": "kv_consumer"}, ("cma", "nixl"), "decode, BHLNC, cma on this host, else nixl"),
        ({"kv_role": "kv_producer"}, ("nixl",), "prefill, BHLNC, nixl"),
        ({"kv_role": "kv_both", "host": "0.0.0.0", "advertised_host": "both-0"}, ("cma",), "prefill and decode"),
    ],
)
def test_an_engine_says_once_how_it_moves_caches(
    make_role: Any,
    settings: dict[str, Any],
    transports: Sequence[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(scheduler_role.logger, "info", lambda text, *values: lines.append(text % values))
    role = make_role(FULL, num_ranks=2, **settings)
    ranks = [
        msgspec.structs.replace(A_RANK, tp_rank=rank, end_points=dict.fromkeys(transports, b"")) for rank in range(2)
    ]
    for _ in range(2):
        role.publish(ranks)
    assert len(lines) == 1
    address = f"{settings.get('advertised_host', '127.0.0.1')}:{role._server.port}"
    assert lines[0].startswith(f"kvferry: {line}")
    assert lines[0].endswith(f"; engine engine-0 at {address}, without keys")


@pytest.mark.parametrize(
    ("error", "is_suspect"),
    [
        (TransportError(Reason.PEER_DIED, "gone."), True),
        (HandoffError(Reason.DEADLINE_EXCEEDED, "late."), True),
        (HandoffError(Reason.SOURCE_CHANGED, "freed."), False),
        (HandoffError(Reason.ABORTED, "given up."), False),
    ],
)
def test_the_next_load_connects_anew_where_a_connection_may_be_lost(error: KVFerryError, is_suspect: bool) -> None:
    """A load over a link that was cut passes its deadline before the transport knows that the connection is lost."""
    suspects: list[str] = []
    role: Any = WorkerRole.__new__(WorkerRole)
    role._index, role._orders = 0, {"r": SimpleNamespace(hold="hold")}
    role._rank = SimpleNamespace(source_engines=SimpleNamespace(suspect=suspects.append))
    role._statistics = role._log = role._traces = role._destination = MagicMock()
    role._account(JobResult("r", error))
    assert suspects == ["hold"] * is_suspect


def engine(model: str, cache_dtype: str = "auto", states: tuple[str, str] = ("auto", "auto"), **changes: Any) -> Any:
    """Return as much of a vLLM configuration as says which model is served."""
    known: dict[str, Any] = {
        "hf_config": SimpleNamespace(to_dict=lambda: {"hidden_size": 64}),
        "hf_text_config": SimpleNamespace(num_hidden_layers=2, model_type="qwen3"),
        "model": model,
        "model_weights": "",
        "revision": None,
        "architectures": ["Qwen3ForCausalLM"],
        "use_mla": False,
        "is_hybrid": False,
        "is_attention_free": False,
        "get_total_num_kv_heads": lambda: 2,
        "get_head_size": lambda: 8,
        "dtype": torch.float32,
        "quantization": None,
        "model_arch_config": SimpleNamespace(quantization_config=None),
        "quantization_config": None,
    }
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(**known | changes),
        cache_config=SimpleNamespace(
            cache_dtype=cache_dtype, mamba_cache_dtype=states[0], mamba_ssm_cache_dtype=states[1]
        ),
        speculative_config=None,
    )
    record_models(config)
    return config


def differing(one: Any, other: Any, **settings: Any) -> set[str]:
    identities = [identity_of(each, Settings(**settings)) for each in (one, other)]
    return {name for name in identities[0].__struct_fields__ if len({getattr(each, name) for each in identities}) > 1}


def test_engines_that_compute_otherwise_differ(tmp_path: Path) -> None:
    """What a load brings must be what the decode engine would have computed, not only as long."""
    plain = engine(str(tmp_path), cache_dtype="fp8")
    assert differing(plain, engine(str(tmp_path), cache_dtype="fp8")) == set()
    assert differing(plain, engine(str(tmp_path), cache_dtype="fp8", dtype=torch.bfloat16)) == {"compute_dtype"}
    online = engine(str(tmp_path), cache_dtype="fp8", quantization="fp8")
    assert differing(plain, online) == {"quantization"}
    assert differing(plain, online, model_id="mine") == set()
    checkpoint = {"model_arch_config": SimpleNamespace(quantization_config={"quant_method": "gptq"})}
    kernels = [engine(str(tmp_path), quantization=name, **checkpoint) for name in ("gptq", "gptq_marlin")]
    assert differing(*kernels) == set(), "each machine runs the same checkpoint by what it has"
    configs = [
        engine(
            str(tmp_path),
            quantization="online",
            quantization_config=QuantizationConfigArgs(linear={"weight": "fp8_per_tensor_static"}, ignore=ignored),
        )
        for ignored in (["a"], ["a"], ["b"])
    ]
    assert differing(*configs[:2]) == set()
    assert differing(*configs[1:]) == {"quantization"}


@pytest.mark.parametrize("states", [("float16", "float32"), ("float32", "float16")])
@pytest.mark.parametrize("kind", ["is_hybrid", "is_attention_free"])
def test_engines_with_states_of_other_types_differ(tmp_path: Path, kind: str, states: tuple[str, str]) -> None:
    """Both types count, that of the convolution's inputs and that of the recurrent state, where the model has any."""
    pair = (("float32", "float32"), states)
    assert differing(*(engine(str(tmp_path), states=each, **{kind: True}) for each in pair)) == {"kv_dtype"}
    assert differing(*(engine(str(tmp_path), states=each) for each in pair)) == set()


def test_an_engine_without_mla_differs_from_one_with_it(tmp_path: Path) -> None:
    """VLLM_MLA_DISABLE leaves the model's configuration as it is."""
    assert differing(engine(str(tmp_path)), engine(str(tmp_path), use_mla=True)) == {"num_kv_heads"}


def test_what_a_copy_of_a_configuration_changes_makes_no_difference(tmp_path: Path) -> None:
    """The place, the library, the order of the fields, and the type of the file's weights: the engine has its own."""
    written = {"hidden_size": 64, "_name_or_path": "a", "transformers_version": "4.56.0", "torch_dtype": "bfloat16"}
    copied = {"name_or_path": "b", "dtype": "float16", "vocab_size": 9, "hidden_size": 64}
    one, other = (
        engine(str(tmp_path), hf_config=SimpleNamespace(to_dict=lambda fields=fields: fields))
        for fields in ({**written, "vocab_size": 9}, copied)
    )
    assert differing(one, other) == set()


def test_a_given_name_stands_for_the_weights(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
        (folder / "weights.bin").write_text(folder.name)
    engines = [engine(str(folder)) for folder in folders]
    assert differing(*engines) == {"weights"}
    assert differing(*engines, model_id="mine") == set()


def test_vllm_55776_a_hubs_model_is_named_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cached(revision: str, commit: str) -> Path:
        """Return a hub's cache in which this revision is this commit."""
        cache = tmp_path / f"{revision}-{commit}"
        model = cache / "models--some--model"
        (model / "refs").mkdir(parents=True)
        (model / "refs" / revision).write_text(commit)
        (model / "snapshots" / commit).mkdir(parents=True)
        (model / "snapshots" / commit / "config.json").write_text("{}")
        return cache

    def weights(cache: Path, revision: str | None = None) -> str:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        return identity_of(engine("some/model", revision=revision), Settings()).weights

    old, new = cached("main", "a" * 40), cached("main", "b" * 40)
    assert weights(old) != weights(new), "the default branch has moved between two downloads"
    assert weights(old) == weights(cached("v1", "a" * 40), "v1"), "two names of one commit"
    assert weights(tmp_path) == weights(tmp_path / "none") != weights(old)
