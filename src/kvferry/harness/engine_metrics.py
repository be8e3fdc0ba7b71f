"""What an engine or a router says of itself at ``/metrics``."""

import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

DROPPED_LABELS = frozenset({"model_name", "engine", "le", "created"})
ANSWER_SECONDS = 10.0
PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Where an engine's prompt tokens came from, since its start or between two scrapes.

    ``received`` came by transfer, ``cached`` were hits in its own prefix cache, ``computed`` it computed.

    >>> PromptTokens(received=7, cached=0, computed=3) - PromptTokens(received=5, cached=0, computed=2)
    PromptTokens(received=2, cached=0, computed=1)
    """

    received: int
    cached: int
    computed: int

    def __sub__(self, earlier: "PromptTokens") -> "PromptTokens":
        return PromptTokens(
            self.received - earlier.received, self.cached - earlier.cached, self.computed - earlier.computed
        )


def scrape_metrics(url: str) -> dict[str, float]:
    """Return the samples at ``url``/metrics, by name and distinguishing labels.

    The model's name and the engine's index are left out of the keys and values that so fall together are added;
    buckets of histograms are left out. Needs ``prometheus_client``, which vLLM brings.
    """
    with urllib.request.urlopen(f"{url}/metrics", timeout=ANSWER_SECONDS) as response:
        return parse_metrics(response.read().decode())


def parse_metrics(text: str) -> dict[str, float]:
    r"""Return the samples in Prometheus' text format; see :func:`scrape_metrics`.

    >>> parse_metrics('# TYPE a counter\na_total{source="disk",engine="0"} 2\na_total{source="disk",engine="1"} 3\n')
    {'a_total{source="disk"}': 5.0}
    """
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                key = _key(sample.name, sample.labels)
                samples[key] = samples.get(key, 0.0) + sample.value
    return samples


def _key(name: str, labels: Mapping[str, str]) -> str:
    kept = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()) if label not in DROPPED_LABELS)
    return f"{name}{{{kept}}}" if kept else name


def prompt_tokens(metrics: Mapping[str, float]) -> PromptTokens:
    """Return where the prompt tokens came from, out of an engine's metrics."""
    received, cached, computed = (
        int(metrics[f'{PROMPT_TOKENS}{{source="{source}"}}'])
        for source in ("external_kv_transfer", "local_cache_hit", "local_compute")
    )
    return PromptTokens(received, cached, computed)


def cache_usage(metrics: Mapping[str, float]) -> float:
    """Return the part of an engine's KV cache blocks that are in use, 0 to 1."""
    return metrics["vllm:kv_cache_usage_perc"]


def cache_block_size(url: str) -> int:
    """Return the tokens in a block of the engine at ``url``; the engine may have chosen it."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"{url}/metrics", timeout=ANSWER_SECONDS) as response:
        families = text_string_to_metric_families(response.read().decode())
        labels = next(
            sample.labels for family in families for sample in family.samples if "cache_config_info" in sample.name
        )
    return int(labels["block_size"])
