"""Run a head-count ablation: train one configuration with several head counts, attentions, forms,
seeds and image sizes.
"""
