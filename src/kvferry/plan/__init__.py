"""Which bytes go where: pure numpy, no clock, no configuration, no transport."""
