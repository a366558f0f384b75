"""Models that are cut into stages: lists of layers, built where they run, and any model by its own forward."""
