"""Measurements of hybrid beside its peers; see README.md in this folder."""
