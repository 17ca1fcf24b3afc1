"""Measure on a GPU: ``make gpu``, ``visionattn benchmark gpu``, and tuning of kernel launches."""
