"""The parts of the pool tier: its index, its client of Mooncake Store, and the threads that call the client."""
