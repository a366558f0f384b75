"""Tests of hybrid; a package, so that its modules import one another as `tests.ranks`."""
