"""Tiers keep blocks for later, behind the engine's own cache. No vLLM, no sockets, no handoff."""
