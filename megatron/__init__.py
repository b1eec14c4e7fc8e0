"""Megatron: pretrain GPT- and BERT-style Transformers, split over tensor, pipeline and data ranks."""
