"""The vLLM plugin. Only ``translate`` and ``layout_choice`` read its configuration, only ``versions`` its version."""
