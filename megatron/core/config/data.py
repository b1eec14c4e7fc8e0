"""Where text comes from and how it becomes samples."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.field import flag


@dataclass(frozen=True)
class DataConfig:
    """Datasets, their split, and the order of samples."""

    data_path: tuple[str, ...] | None = flag(None, nargs="*")
    """One .bin/.idx prefix, several prefixes, or pairs of weight and prefix; divided by --split."""
    split: str | None = None
    """Shares of training, validation and test, any scale; default 969, 30, 1."""
    train_data_path: tuple[str, ...] | None = flag(None, nargs="*")
    """Prefixes (or weights and prefixes) for training only, in place of --data-path."""
    valid_data_path: tuple[str, ...] | None = flag(None, nargs="*")
    """Prefixes (or weights and prefixes) for validation only."""
    test_data_path: tuple[str, ...] | None = flag(None, nargs="*")
    """Prefixes (or weights and prefixes) for testing only."""
    data_cache_path: str | None = None
    """Folder for sample indices; default a folder cache/ beside each dataset."""
    mid_level_dataset_surplus: float = 0.005
    """Share of spare samples that each dataset of a blend is built with."""
    dataloader_type: Literal["single", "cyclic"] = "single"
    """single: one pass in index order; cyclic: shuffled anew each epoch."""
    num_workers: int = 2
    """Processes that read data for each rank; 0 reads in the training process."""
    mock_data: bool = False
    """Train on made-up numbers instead of files."""
    eod_mask_loss: bool = False
    """Count no loss where the input token is end-of-document."""
    reset_position_ids: bool = False
    """Start positions anew after each end-of-document."""
    reset_attention_mask: bool = False
    """Let no token attend across an end-of-document."""

    def __post_init__(self) -> None:
        per_split = (self.train_data_path, self.valid_data_path, self.test_data_path)
        if self.data_path and any(per_split):
            raise ValueError("--data-path and --train/valid/test-data-path exclude each other")
        if self.mock_data and (self.data_path or any(per_split)):
            raise ValueError("--mock-data and data paths exclude each other")
        if self.num_workers < 0:
            raise ValueError(f"--num-workers {self.num_workers}: must be 0 or above")
