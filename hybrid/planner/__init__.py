"""The layout for a model on a cluster: memory and time of each candidate, the search, the plan."""

__all__: list[str] = []
