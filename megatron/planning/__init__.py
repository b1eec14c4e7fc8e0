"""A model on paper: what a training run costs, in plain Python."""
