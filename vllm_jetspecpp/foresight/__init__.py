"""One round of the method, as the paper tells it, in fixed-shape tensor programs."""
