"""Kernelized attention: weights are products of feature maps. Source: Katharopoulos et al. 2020."""
