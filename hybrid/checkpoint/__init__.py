"""Checkpoints: what each rank writes of the training state, and how any layout reads it again.

Files, their manifest and the folder of steps import no torch: the command line looks at checkpoints with them.
"""
