"""Doors to other libraries: reward models as functions for TRL."""
