"""Which bytes go where: numpy only, no clock, no configuration, no transport."""
