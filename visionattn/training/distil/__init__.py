"""Distill a softmax teacher into a model with linear attention."""
