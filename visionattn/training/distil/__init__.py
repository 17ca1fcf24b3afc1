"""Distillation: a model with linear attention learns what its softmax teacher computes."""
