"""Measure on a GPU: ``make gpu``, ``visionattn benchmark gpu``, and the tuning of launches."""
