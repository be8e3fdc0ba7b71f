"""The vLLM plugin. ``translate`` and ``layout_choice`` alone read its configuration, ``versions`` its version."""
