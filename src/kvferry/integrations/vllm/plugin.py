"""Entry point ``vllm.general_plugins``: registers connectors, and the layouts of CPU attention."""

import logging
from functools import wraps
from typing import TYPE_CHECKING

from kvferry.errors import KVFerryError
from kvferry.integrations.vllm.connector_configs import connector_configs
from kvferry.integrations.vllm.first_checks import check_transfer_config
from kvferry.integrations.vllm.identity import record_models
from kvferry.integrations.vllm.missing_embeddings import require_embeddings
from kvferry.integrations.vllm.request_checks import check_requests
from kvferry.integrations.vllm.versions import check_version, report_version
from kvferry.integrations.vllm.waiting_workers import make_waits_sleep

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

CONNECTORS = {
    "KVFerryConnector": "kvferry.integrations.vllm.connector",
    "KVFerryOffloadConnector": "kvferry.integrations.vllm.offload_connector",
}
"""The module of each connector, which has a class of the connector's name."""
_MARK = "_kvferry_checks_and_records"


def register() -> None:
    """VLLM calls this in every process. Safe to call again."""
    try:
        check_version()
    except KVFerryError as error:
        # The connector refuses to start with this version; an engine without the connector must start.
        logger.error("kvferry: %s", error)
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, module in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)
    from kvferry.integrations.vllm.layout_choice import widen_cpu_attention

    widen_cpu_attention()
    require_embeddings(CONNECTORS)
    check_and_record_configurations()
    make_waits_sleep()
    check_requests()
    log_as_vllm_does()
    report_version()


def check_and_record_configurations() -> None:
    """Make vLLM check kvferry's settings and record the models in the last step of making a configuration.

    vLLM itself asks a connector once the weights are loaded, earlier only for full CUDA graphs; by then its model
    classes have changed the configuration. Before the last step a connector that vLLM finds by its module's path has
    not been imported. Safe to call again.
    """
    from vllm.config import VllmConfig

    verify = VllmConfig._verify_kv_transfer_compat
    if hasattr(verify, _MARK):
        return

    @wraps(verify)
    def check_verify_and_record(config: "VllmConfig") -> None:
        check_transfer_config(config.kv_transfer_config)
        verify(config)
        if any(each.name in CONNECTORS for each in connector_configs(config.kv_transfer_config)):
            record_models(config)

    setattr(check_verify_and_record, _MARK, True)
    VllmConfig._verify_kv_transfer_compat = check_verify_and_record  # type: ignore[method-assign,assignment]


def log_as_vllm_does() -> None:
    """Send kvferry's messages where vLLM's go, at vLLM's level."""
    ours, theirs = logging.getLogger("kvferry"), logging.getLogger("vllm")
    ours.handlers = theirs.handlers
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate
