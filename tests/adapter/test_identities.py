"""Engines whose published configurations differ in one field that changes the cache's meaning refuse each other."""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.handshake import compare_identities
from kvferry.handoff.messages import Identity
from kvferry.integrations.vllm.identity import identity_of
from kvferry.integrations.vllm.plugin import register
from kvferry.integrations.vllm.settings import Settings

from ..matrix_results import Results, results_folder
from ..small_models.weights import names, published

IN_EVERY_RUN = ("DeepSeek-V3", "Falcon-H1-7B-Instruct", "Olmo-3-7B-Instruct", "Phi-3-mini-128k-instruct", "gpt-oss-20b")
TELLING = (
    *("rope_theta", "rope_local_base_freq", "global_rope_theta", "rope_base", "factor", "partial_rotary_factor"),
    *("sliding_window", "attention_chunk_size", "rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    *("layernorm_epsilon", "mscale", "mscale_all_dim", "attention_multiplier", "embedding_multiplier"),
)
"""Fields that change what a cache holds and not how large it is; those of the windows change which tokens it keeps."""
REFUSED: Mapping[str, str] = {
    "EXAONE-4.5-33B-FP8": "must be equal to the number of `layer_types`",
    "Hunyuan-7B-Instruct-GPTQ-Int4": "desc_act=True",
    "Kimi-Linear-48B-A3B-Instruct": "--mamba-block-size can only be set with --enable-prefix-caching",
    "Ling-lite-1.5": "contains custom code",
}
"""Configurations of which vLLM makes no engine here, and words of its reason."""
BY_PROCESSOR = frozenset({"Kimi-Linear-48B-A3B-Instruct"})
"""Refused by vLLM on some processors: where one has AVX-512 BF16, vLLM keeps these states in another type."""
UNREAD = {"Bamba-9B-v2": "partial_rotary_factor"}
"""Fields that their model's configuration class does not read: its value is always the same."""
TOWERS = ("vision_config", "audio_config", "quantization_config")


@pytest.fixture(autouse=True)
def plugin() -> None:
    register()


def identity(folder: Path, config: Mapping[str, Any]) -> Identity:
    """Return the identity of an engine that serves a model of this configuration."""
    (folder / "config.json").write_text(json.dumps(config))
    engine = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        enable_prefix_caching=False,  # as states need it
        kv_transfer_config=KVTransferConfig(kv_connector="KVFerryConnector", kv_role="kv_both"),
        **({"language_model_only": True} if any(tower in config for tower in TOWERS[:2]) else {}),
    ).create_engine_config()
    return identity_of(engine, Settings())


def with_one_other(config: dict[str, Any], unread: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the configuration with each telling number changed, at any depth, and the number's place."""

    def places(part: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for name, value in part.items():
            if isinstance(value, Mapping) and name not in TOWERS:
                yield from places(value, (*path, name))
            elif name == unread or (name == "sliding_window" and part.get("use_sliding_window") is False):
                continue
            elif name in TELLING and isinstance(value, int | float) and not isinstance(value, bool):
                yield (*path, name)

    for place in places(config, ()):
        changed = deepcopy(config)
        part = changed
        for name in place[:-1]:
            part = part[name]
        part[place[-1]] *= 2
        yield ".".join(place), changed


def record(name: str, outcome: str) -> None:
    if (folder := results_folder()) is not None:
        Results(folder).add_model(name, "identity", outcome)


@pytest.mark.parametrize("name", IN_EVERY_RUN if results_folder() is None else names())
def test_one_other_field_is_refused(name: str, tmp_path: Path) -> None:
    config = published(name)
    record(name, "**failed**")
    try:
        ours = identity(tmp_path, config)
    except Exception as error:
        if REFUSED.get(name, "no reason") not in str(error):
            raise
        record(name, f"no engine: {REFUSED[name]}")
        return
    assert name not in REFUSED or name in BY_PROCESSOR, "is no longer refused"
    compare_identities(ours, identity(tmp_path, config))
    changes = list(with_one_other(config, UNREAD.get(name)))
    for place, changed in changes:
        theirs = identity(tmp_path, changed)
        assert theirs != ours, place
        with pytest.raises(HandoffError, match="do not serve the same cache: model: ") as refusal:
            compare_identities(ours, theirs)
        assert refusal.value.reason is Reason.MODEL_MISMATCH
    assert changes
    record(name, f"yes ({len(changes)} fields)")
