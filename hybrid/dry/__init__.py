"""Single ranks of a job of any size, without the others and without values: `hybrid.dryrun`."""
