"""An engine with kvferry's connectors takes no image without its embedding: it may have to compute any prompt."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import ECTransferConfig, KVTransferConfig, VllmConfig
from vllm.config.multimodal import MultiModalConfig

from kvferry.integrations.vllm.plugin import CONNECTORS, register


def resolved(connector: str, role: str, *listed: str, enable: bool = False, encoder: str = "") -> tuple[bool, bool]:
    """Return whether the configuration of an engine lets embeddings be missing, and takes any at all."""
    register()
    register()
    extra = {"connectors": [{"kv_connector": each, "kv_role": role} for each in listed]} if listed else {}
    images = MultiModalConfig(enable_mm_embeds=enable, allow_missing_mm_embeddings=True)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=images),
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector,
            kv_role=role,  # type: ignore[arg-type]
            kv_connector_extra_config=extra,
        ),
        ec_transfer_config=ECTransferConfig(ec_connector="ECExampleConnector", ec_role=encoder) if encoder else None,  # type: ignore[arg-type]
    )
    VllmConfig._resolve_mm_embedding_inputs(config)
    return images.allow_missing_mm_embeddings, images.enable_mm_embeds


@pytest.mark.parametrize("enable", [False, True])
@pytest.mark.parametrize("role", ["kv_both", "kv_consumer", "kv_producer"])
@pytest.mark.parametrize("connector", CONNECTORS)
def test_our_engines_require_them_and_take_them_as_the_operator_says(connector: str, role: str, enable: bool) -> None:
    assert resolved(connector, role, enable=enable) == (False, enable)


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
def test_engines_with_other_connectors_are_as_vllm_has_them(role: str) -> None:
    assert resolved("NixlConnector", role) == (True, True)
    assert resolved("MultiConnector", role, "KVFerryConnector", "NixlConnector") == (True, True)
    assert resolved("MultiConnector", role, "KVFerryConnector", "KVFerryOffloadConnector") == (False, False)


def test_an_engine_that_gets_them_from_an_encoder_needs_none_in_the_request() -> None:
    assert resolved("KVFerryConnector", "kv_both", encoder="ec_consumer") == (True, True)
    assert resolved("KVFerryConnector", "kv_both", encoder="ec_producer") == (False, False)


def test_a_model_of_text_has_none() -> None:
    register()
    for model in (None, SimpleNamespace(multimodal_config=None)):
        config: Any = SimpleNamespace(
            model_config=model,
            kv_transfer_config=KVTransferConfig(kv_connector="KVFerryConnector", kv_role="kv_both"),
            ec_transfer_config=None,
        )
        VllmConfig._resolve_mm_embedding_inputs(config)
