"""The library: parallel layers, models, optimizer, datasets and checkpoints. It parses no flags and prints nothing."""
