"""What runs on the GPU at hand: ``make gpu``, ``visionattn benchmark gpu``, other launches."""
