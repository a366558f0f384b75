"""Models that are cut into stages: lists of layers, built where they run."""
