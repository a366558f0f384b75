"""Models built on the meta device: their own initialisation is run again, one parameter at a time."""
