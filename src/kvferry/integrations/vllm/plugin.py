"""Entry point ``vllm.general_plugins``: registers connectors and offloading spec, and the layouts of CPU attention."""

import logging

from kvferry.errors import KVFerryError
from kvferry.integrations.vllm.first_checks import check_before_weights
from kvferry.integrations.vllm.missing_embeddings import require_embeddings
from kvferry.integrations.vllm.recorded_models import record_before_models_are_built
from kvferry.integrations.vllm.request_checks import check_requests
from kvferry.integrations.vllm.versions import check_version, report_version
from kvferry.integrations.vllm.waiting_workers import make_waits_sleep

logger = logging.getLogger(__name__)

CONNECTORS = {
    "KVFerryConnector": "kvferry.integrations.vllm.connector",
    "KVFerryOffloadConnector": "kvferry.integrations.vllm.offload_connector",
}
"""The module of each connector, which has a class of the connector's name."""
SPEC_NAME = "KVFerryOffloadingSpec"
SPEC_MODULE = "kvferry.integrations.vllm.offloading_spec"


def register() -> None:
    """VLLM calls this in every process. Safe to call again."""
    try:
        check_version()
    except KVFerryError as error:
        # The connector refuses to start with this version; an engine without the connector must start.
        logger.error("kvferry: %s", error)
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    for name, module in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)
    if SPEC_NAME not in OffloadingSpecFactory._registry:
        OffloadingSpecFactory.register_spec(SPEC_NAME, SPEC_MODULE, SPEC_NAME)
    from kvferry.integrations.vllm.layout_choice import widen_cpu_attention

    widen_cpu_attention()
    check_before_weights()
    require_embeddings(CONNECTORS)
    record_models_of_engines()
    make_waits_sleep()
    check_requests()
    log_as_vllm_does()
    report_version()


def record_models_of_engines() -> None:
    """Record the models of each engine with kvferry, before vLLM builds them. Safe to call again."""
    record_before_models_are_built({*CONNECTORS, SPEC_NAME})


def log_as_vllm_does() -> None:
    """Send kvferry's messages where vLLM's go, at vLLM's level."""
    ours, theirs = logging.getLogger("kvferry"), logging.getLogger("vllm")
    ours.handlers = theirs.handlers
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate
