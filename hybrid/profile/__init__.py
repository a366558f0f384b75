"""Where the time of a training step goes: the clock, torch's trace, the table, what to change; loggers of steps."""
