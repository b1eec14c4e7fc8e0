"""The application: flags, set-up, the training loop and its hooks."""
