"""The metrics of an engine or a router at ``/metrics``."""

import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

DROPPED_LABELS = frozenset({"model_name", "engine", "le", "created"})
ANSWER_SECONDS = 10.0
PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
CACHED_TOKENS = "vllm:prompt_tokens_cached_by_source_total"


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """An engine's prompt tokens by origin, since its start or between two scrapes.

    ``received`` by transfer, ``cached`` from the engine's own prefix cache, ``computed`` by the engine.

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
    """Return the samples at ``url``/metrics, by name and labels.

    The keys omit the model's name and the engine's index; samples with the same key are added. Buckets of histograms
    are omitted. Needs ``prometheus_client``, which vLLM installs.
    """
    return parse_metrics(_scrape(url))


def _scrape(url: str) -> str:
    # The URL is that of an engine which the caller started.
    with urllib.request.urlopen(f"{url}/metrics", timeout=ANSWER_SECONDS) as response:  # nosec B310
        return str(response.read().decode())


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
    """Return the prompt tokens by origin from an engine's metrics."""
    received, cached, computed = (
        int(metrics[f'{PROMPT_TOKENS}{{source="{source}"}}'])
        for source in ("external_kv_transfer", "local_cache_hit", "local_compute")
    )
    return PromptTokens(received, cached, computed)


def cached_tokens(metrics: Mapping[str, float]) -> dict[str, int]:
    """Return the prompt tokens that an engine did not compute, by tier: ``device``, ``host``, ``disk``.

    Counted when a request is admitted, so a request that is preempted before its load counts twice.

    >>> cached_tokens({f'{CACHED_TOKENS}{{source="host"}}': 384.0, f'{CACHED_TOKENS}{{source="disk"}}': 0.0})
    {'host': 384, 'disk': 0}
    """
    prefix, suffix = f'{CACHED_TOKENS}{{source="', '"}'
    return {
        key.removeprefix(prefix).removesuffix(suffix): int(value)
        for key, value in metrics.items()
        if key.startswith(prefix)
    }


def cache_usage(metrics: Mapping[str, float]) -> float:
    """Return the used fraction of an engine's KV cache blocks, 0 to 1."""
    return metrics["vllm:kv_cache_usage_perc"]


def cache_block_size(url: str) -> int:
    """Return the tokens of a block of the engine at ``url``, which may have chosen the size itself."""
    from prometheus_client.parser import text_string_to_metric_families

    samples = (sample for family in text_string_to_metric_families(_scrape(url)) for sample in family.samples)
    return int(next(sample.labels["block_size"] for sample in samples if "cache_config_info" in sample.name))
