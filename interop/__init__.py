"""Adapters for other libraries: reward models as functions for TRL."""
