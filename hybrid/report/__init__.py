"""Plans and timetables as tables and pictures for people."""

__all__: list[str] = []
