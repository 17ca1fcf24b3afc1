"""What runs on the GPU at hand: ``make gpu`` and ``visionattn benchmark gpu`` and ``tune``."""
