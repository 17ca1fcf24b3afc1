"""Measure operations and models, and draw the results. No other part of the package imports it."""
