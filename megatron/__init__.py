"""Megatron: pretrain GPT-style Transformers, split over tensor, pipeline and data ranks."""
