"""The library: parallel layers, models, optimizer, datasets, checkpoints. No flags, no prints."""
