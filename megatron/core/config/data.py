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
    data_args_path: str | None = None
    """File that holds what would follow --data-path, in its place."""
    per_split_data_args_path: str | None = None
    """JSON file in place of --train-, --valid- and --test-data-path: {"train": [...], "valid": [...],
    "test": [...]}."""
    data_cache_path: str | None = None
    """Folder for sample indices; default a folder cache/ beside each dataset."""
    mmap_bin_files: bool = flag(True, off="--no-mmap-bin-files")
    """Read tokens from their files request by request, instead of mapping the files into memory."""
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
        ways = {
            "--data-path": self.data_path,
            "--train/valid/test-data-path": self.train_data_path
            or self.valid_data_path
            or self.test_data_path,
            "--data-args-path": self.data_args_path,
            "--per-split-data-args-path": self.per_split_data_args_path,
            "--mock-data": self.mock_data,
        }
        given = [name for name, value in ways.items() if value]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: each says where all of the data is")
        if self.num_workers < 0:
            raise ValueError(f"--num-workers {self.num_workers}: must be 0 or above")
