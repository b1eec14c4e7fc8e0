"""What goes wrong with checkpoints, for whoever launched the job."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read whole; the message says which file, tensor or rank."""


class CheckpointNotFoundError(CheckpointError):
    """There is no complete checkpoint where one was asked for; the message says what is there instead."""
