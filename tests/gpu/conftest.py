"""Tests that need a GPU: `make test-gpu` runs them, and names each part that cannot run."""

import os

collect_ignore_glob = [] if os.environ.get("KVFERRY_GPU") else ["test_*.py"]
