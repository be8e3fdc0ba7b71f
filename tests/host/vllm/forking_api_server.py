"""vLLM's API server, whose engine core and workers are forked from it, as on GPUs with vLLM's default.

On a CPU vLLM starts each of these processes anew, and each imports vLLM again: some ten seconds of a core.
"""

import runpy

if __name__ == "__main__":
    import imported_engine  # noqa: F401

    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
