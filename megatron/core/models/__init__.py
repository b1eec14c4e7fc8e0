"""Whole models, one pipeline stage of each at a time."""

from megatron.core.models.embedding import LanguageModelEmbedding, PositionEmbedding
from megatron.core.models.gpt import GPTModel, ModelStage, OutputLayer

__all__ = ["GPTModel", "LanguageModelEmbedding", "ModelStage", "OutputLayer", "PositionEmbedding"]
