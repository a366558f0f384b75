"""One narrated test per bug that was found in use: what went wrong, and what is right."""
