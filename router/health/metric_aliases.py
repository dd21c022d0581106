"""The router's metrics under vLLM's names, so that dashboards and autoscalers made for vLLM work.

Owns the table of names. Values are those of the metric that each alias stands for; docs/operations/metrics.md says
where their meaning differs. Every sample has the labels of its metric, `model_name` among them, and vLLM's `engine`:
the node's id where there is one. What pickers of endpoints read has one sample for a model, that of the whole relay:
they take the first they find.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

MODEL_LABEL = "model_name"
VLLM_NAMES: Mapping[str, tuple[str, ...]] = {
    "baton:num_requests_running": ("vllm:num_requests_running",),
    "baton:num_requests_waiting": ("vllm:num_requests_waiting",),
    "baton:relay_kv_cache_usage_perc": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "baton:cache_config_info": ("vllm:cache_config_info",),
    "baton:num_preemptions": ("vllm:num_preemptions",),
    "baton:spec_decode_num_drafts": ("vllm:spec_decode_num_drafts",),
    "baton:spec_decode_num_draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "baton:spec_decode_num_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "baton:spec_decode_num_accepted_tokens_per_pos": ("vllm:spec_decode_num_accepted_tokens_per_pos",),
    "baton:prompt_tokens": ("vllm:prompt_tokens",),
    "baton:generation_tokens": ("vllm:generation_tokens",),
    "baton:prefix_cache_queries": ("vllm:prefix_cache_queries",),
    "baton:prefix_cache_hits": ("vllm:prefix_cache_hits",),
    "baton:request_success": ("vllm:request_success",),
    "baton:time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "baton:inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "baton:request_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
    "baton:e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "baton:request_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "baton:request_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "baton:request_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "baton:request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "baton:request_generation_tokens": ("vllm:request_generation_tokens",),
}
"""Names without the `_total` of counters. The second name of a metric is vLLM's earlier one."""


class VllmAliases(Collector):
    """Reads `source` at each scrape, and shows what has an alias under it."""

    def __init__(self, source: CollectorRegistry) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        """Every metric with an alias, under the alias."""
        for family in self._source.collect():
            for alias in VLLM_NAMES.get(family.name, ()):
                yield _renamed(family, alias)


def _renamed(family: Metric, name: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        labels = {"engine": sample.labels.get("node", "0"), **sample.labels}
        suffix = sample.name.removeprefix(family.name)
        renamed.add_sample(f"{name}{suffix}", labels, sample.value)
    return renamed
