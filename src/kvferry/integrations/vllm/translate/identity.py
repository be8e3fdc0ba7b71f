"""What an engine serves: its model, weights, quantisation and element types."""

from typing import TYPE_CHECKING

from kvferry.handoff.messages import Identity
from kvferry.integrations.vllm.recorded_models import recorded
from kvferry.integrations.vllm.settings import Settings
from kvferry.integrations.vllm.translate.weights import weights_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def identity_of(vllm_config: "VllmConfig", settings: Settings) -> Identity:
    """Return the identity on which a peer must agree.

    All but ``weights`` is from the record that the engine's configuration carries. Each process reads the weights
    itself, since ranks may run on hosts with other files; the scheduler compares what its ranks have read. Raises as
    :func:`recorded`.
    """
    model = vllm_config.model_config
    record = recorded(model)
    return Identity(
        model=(settings.model_id or record.config) + record.positions,
        weights=settings.model_id or weights_of(_place_of_weights(model), model.revision).digest,
        quantization=settings.model_id or record.quantization,
        compute_dtype=record.compute_dtype,
        architecture=record.architectures[0],
        kv_dtype=record.kv_dtype,
        num_layers=record.num_layers,
        num_kv_heads=record.num_kv_heads,
        head_size=record.head_size,
    )


def _place_of_weights(model: "ModelConfig") -> str:
    """Return where the engine loads its weights from.

    Of a model in an object store this host has a folder without weights, with a name of its own.
    """
    return str(model.model_weights or model.model).rstrip("/")
