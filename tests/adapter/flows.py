"""The parameters of the two requests that a router makes of one prompt, in each flow.

In the sequential flow a router waits for the prefill engine's answer, which names a hold, and sends it to the decode
engine. In the concurrent flow it names a transfer in both requests.
"""

from typing import Any, Literal, get_args

from kvferry.handoff.wire.bootstrap import id_in_epoch

Flow = Literal["sequential", "concurrent"]
FLOWS: tuple[Flow, ...] = get_args(Flow)


def to_prefill(flow: Flow, transfer_id: str = "x") -> dict[str, Any]:
    """Return the parameters of the request to a prefill engine."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    return params if flow == "sequential" else {**params, "transfer_id": transfer_id}


def to_decode(flow: Flow, prefill: Any, answered: dict[str, Any] | None, transfer_id: str = "x") -> dict[str, Any]:
    """Return the parameters of the request to a decode engine.

    ``prefill`` is the scheduler's role of the prefill engine, or the engine; ``answered`` are the parameters in its
    answer, which the sequential flow copies.
    """
    if flow == "sequential":
        assert answered, "the prefill engine holds nothing"
        return answered
    role = prefill.connector._scheduler if hasattr(prefill, "connector") else prefill
    return {
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_engine_id": id_in_epoch(role._state.engine_id, role._state.epoch),
        "remote_bootstrap_addr": f"http://127.0.0.1:{role._source.bootstrap.port}",
    }
