"""The laboratory: it measures operations and models, and draws what it measured. Nothing else
imports it.
"""
