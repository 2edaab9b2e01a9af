"""Doors to other projects: models in Hugging Face's form, and reward models as functions for TRL."""
