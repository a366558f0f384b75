"""Tests of one process: parts of the engine on their own, without a process group."""
