"""What a trained model is asked to do."""

from megatron.inference.generate import SamplingOptions, generate

__all__ = ["SamplingOptions", "generate"]
