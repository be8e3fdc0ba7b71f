"""The vLLM plugin. ``translate`` and ``plugin`` alone read its configuration, ``versions`` its version."""
