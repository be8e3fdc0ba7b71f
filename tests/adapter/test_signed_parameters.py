"""With keys, a decode engine believes no parameters that a trusted prefill engine has not signed."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.wire.trust import make_keys
from kvferry.integrations.vllm.request_checks import check_params

from .scheduler_requests import FULL, PROMPT, allocated, handle_of, next_step, request, run_prefill

Params = dict[str, Any]


@pytest.fixture
def keys(tmp_path: Path) -> str:
    make_keys(tmp_path / "keys")
    return str(tmp_path / "keys")


def order_for(role: Any, params: Params, name: str = "d", lora: LoRARequest | None = None) -> Any:
    ours = request(PROMPT, params, name)
    ours.lora_request = lora
    role.on_new_request(ours)
    role.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15]), len(PROMPT))
    [order] = next_step(role).loads
    return order


@pytest.fixture
def adapter(tmp_path: Path) -> LoRARequest:
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(8) + b"weights")
    (tmp_path / "adapter_config.json").write_text("{}")
    return LoRARequest("sql", 1, str(tmp_path))


def changes(params: Params) -> dict[str, Params]:
    """Return the parameters with one field changed, for every field that a decode engine uses."""
    found = {}
    for field in ("remote_engine_id", "remote_request_id", "remote_host"):
        found[field] = params | {field: "another"}
    found["remote_port"] = params | {"remote_port": params["remote_port"] % 65535 + 1}
    found["remote_block_ids"] = params | {"remote_block_ids": [params["remote_block_ids"][0][::-1]]}
    for field, value in params["kvferry"].items():
        if field == "signature":
            other: Any = value[:-1] + ("0" if value[-1] != "0" else "1")
        elif field == "is_late":
            other = not value
        elif field in ("generation", "prompt_digest", "adapter"):
            other = ("1" if value[0] == "0" else "0") + value[1:]
        elif field == "version":
            other = 0  # of a range that both engines speak
        else:
            other = [size * 2 for size in value] if field == "block_sizes" else value + 1
        found[field] = params | {"kvferry": params["kvferry"] | {field: other}}
    return found


def test_signed_parameters_are_believed_and_their_host_is_trusted(keys: str, make_role: Any) -> None:
    prefill, decode = make_role(FULL, keys=keys), make_role(FULL, keys=keys)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1]) or {}
    order = order_for(decode, params)
    assert order.error is None
    assert order.hold.is_trusted
    assert order.hold.handle == handle_of(params)


def test_the_order_of_fields_and_further_ones_do_not_matter(keys: str, make_role: Any) -> None:
    """Routers copy the object, and may add to it."""
    prefill, decode = make_role(FULL, keys=keys), make_role(FULL, keys=keys)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1]) or {}
    turned = {name: params[name] for name in reversed(params)} | {"added": 1, "tp_size": 7}
    turned["kvferry"] = {name: params["kvferry"][name] for name in reversed(params["kvferry"])}
    assert order_for(decode, turned).error is None


def test_a_change_of_any_field_is_refused_before_the_engine_connects_anywhere(keys: str, make_role: Any) -> None:
    prefill, decode = make_role(FULL, keys=keys), make_role(FULL, keys=keys)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1]) or {}
    forgeries = changes(params)
    assert len(forgeries) == 15
    for field, forged in forgeries.items():
        order = order_for(decode, forged, field)
        assert order.error.reason is Reason.PERMISSION_DENIED, field
        assert order.hold is None, field
    assert decode._state.leases._holds._uses == {}, "a renewal would go to the host that they name"


def test_a_change_of_any_field_of_an_adapters_prompt_is_refused_in_the_api_server_too(
    keys: str, adapter: LoRARequest, make_role: Any
) -> None:
    prefill, decode = make_role(FULL, keys=keys), make_role(FULL, keys=keys)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1], lora=adapter) or {}
    config = SimpleNamespace(kv_connector="KVFerryConnector", kv_connector_extra_config={"keys": keys})
    check_params(config, params, "r")
    forgeries = changes(params)
    assert len(forgeries) == 16
    forgeries["no adapter"] = params | {"kvferry": {**params["kvferry"], "adapter": ""}}
    for field, forged in forgeries.items():
        assert order_for(decode, forged, field, adapter).error.reason is Reason.PERMISSION_DENIED, field
        with pytest.raises(HandoffError) as refused:
            check_params(config, forged, "r")
        assert refused.value.reason is Reason.PERMISSION_DENIED, field
    assert order_for(decode, params, "d", adapter).error is None


def test_parameters_without_a_signature_are_refused(keys: str, make_role: Any) -> None:
    prefill, decode = make_role(FULL), make_role(FULL, keys=keys)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1]) or {}
    assert "signature" not in params["kvferry"]
    order = order_for(decode, params)
    assert order.error.reason is Reason.PERMISSION_DENIED
    assert '"keys"' in order.error.remedy


def test_a_signature_of_a_key_that_is_not_trusted_is_refused_until_it_is(
    keys: str, tmp_path: Path, make_role: Any
) -> None:
    make_keys(tmp_path / "other")
    prefill, decode = make_role(FULL, keys=str(tmp_path / "other")), make_role(FULL, keys=keys)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1]) or {}
    assert order_for(decode, params).error.reason is Reason.PERMISSION_DENIED
    shutil.copy(tmp_path / "other" / "certificate.pem", Path(keys) / "trusted" / "other.pem")
    assert order_for(make_role(FULL, keys=keys), params).error is None


def test_without_keys_a_signature_is_not_looked_at_and_no_host_is_trusted(keys: str, make_role: Any) -> None:
    prefill, decode = make_role(FULL, keys=keys), make_role(FULL)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1]) or {}
    order = order_for(decode, params)
    assert order.error is None
    assert not order.hold.is_trusted
