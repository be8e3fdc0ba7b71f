"""Where each byte of a KV cache is: pure integers, no torch."""
