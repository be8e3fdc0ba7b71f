"""Published configurations, made small: labelled bytes move between tensor-parallel sizes in vLLM's own views.

This needs no engine, so models are tried too that vLLM's CPU build does not run. In ``make test-matrix`` all are.
"""

import json
from pathlib import Path

import pytest

from ..matrix_results import Results, results_folder
from ..small_models import shrink
from ..small_models.weights import names, published

pytest.importorskip("vllm")

from .planner_oracle import Oracle

SOME = (
    "AI21-Jamba-1.5-Mini",
    "DeepSeek-V3.2",
    "Kimi-Linear-48B-A3B-Instruct",
    "Laguna-XS.2-FP8",
    "MiniMax-M2",
    "MiniMax-M2-AWQ",
    "MiniMax-M2.5-NVFP4",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "Qwen3-Next-80B-A3B-Instruct",
    "Step-3.5-Flash",
    "gemma-3n-E4B-it",
    "gemma-4-26B-A4B",
)
"""In every run: those that no engine on a CPU runs, and some of other kinds."""
MIXED_PAGES = ("DeepSeek-V3.2", "GLM-5", "gemma-4-26B-A4B", "gemma-4-31B-it", "gemma-4-E4B-it")
"""Layers with pages of several sizes, for which vLLM takes the block-outermost layouts alone."""
UNSUPPORTED = {
    "DeepSeek-V3.2": "pages differ in size",
    "GLM-5": "pages differ in size",
    "LFM2-1.2B": "SHORT_CONV",
    "LFM2-8B-A1B": "SHORT_CONV",
    "Llama-4-Scout-17B-16E-Instruct": "ChunkedLocalAttentionSpec",
    "Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": "ChunkedLocalAttentionSpec",
}
"""Models of which kvferry makes no plan at these sizes, and words of its reason."""
REFUSED = {
    "Bamba-9B-fp8": "does not dispatch through the Transformers attention interface",
    "Bamba-9B-v2": "does not dispatch through the Transformers attention interface",
    "EXAONE-4.5-33B-FP8": "must be equal to the number of `layer_types`",
    "Hunyuan-7B-Instruct-GPTQ-Int4": "desc_act=True",
    "Hunyuan-A13B-Instruct": "unsupported operand type(s) for **",
    "Ling-lite-1.5": "trust_remote_code=True",
}
"""Configurations of which vLLM makes no model, and words of its reason."""


@pytest.mark.parametrize("name", names() if results_folder() else SOME)
def test_labels_reach_their_places_in_vllms_views(name: str, oracle: Oracle, tmp_path: Path) -> None:
    """From TP 2 to TP 1, and from TP 1 to TP 2; no byte elsewhere is written."""
    (path := tmp_path / f"{name}.json").write_text(json.dumps(shrink(published(name))))
    found = oracle.moved(path, block_size=16, layout="BLHNC" if name in MIXED_PAGES else "BHLNC")
    kind, what = next(iter(found.items()))
    if folder := results_folder():
        said = {"bytes": "yes", "differs": f"**failed**: {what}"}
        Results(folder).add_model(name, "views", said.get(kind, f"no: {what}"))
    if name in UNSUPPORTED or name in REFUSED:
        assert kind == ("unsupported" if name in UNSUPPORTED else "refused"), found
        assert (UNSUPPORTED | REFUSED)[name] in what
    else:
        assert kind == "bytes", found
        assert what > 0
