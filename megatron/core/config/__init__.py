"""The typed settings of everything in the library: frozen dataclasses, numbers and words only.

Each field is one command-line flag: its name, type, default, choices and (in the string under it) its help.
"""

from megatron.core.config.data import DataConfig
from megatron.core.config.field import FlagSpec, flag, flag_spec
from megatron.core.config.fim import FimConfig
from megatron.core.config.optimizer import OptimizerConfig, PrecisionConfig, ScheduleConfig
from megatron.core.config.parallel import ParallelConfig, ScheduleName
from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.config.transformer import TransformerConfig

__all__ = [
    "DataConfig",
    "FimConfig",
    "FlagSpec",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "ScheduleConfig",
    "ScheduleName",
    "TokenizerConfig",
    "TransformerConfig",
    "flag",
    "flag_spec",
]
