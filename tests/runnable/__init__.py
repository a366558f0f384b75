"""Examples, the pages' code blocks, benchmark smoke: what a reader would paste."""
