"""What block-wise training is compared with, through the same `fit`. Loaded by name; the core works without."""
