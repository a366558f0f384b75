"""Checks of the code's shape: floors, public names, options, pages."""
