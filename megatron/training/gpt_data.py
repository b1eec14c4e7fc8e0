"""The datasets that the settings of a GPT run describe."""

from megatron.core.config import FimConfig
from megatron.core.datasets import DatasetSplits, build_datasets
from megatron.core.datasets.fim import TextTokenizer
from megatron.core.tokenizers import Tokenizer
from megatron.training.config import RunConfig


def gpt_datasets(
    config: RunConfig, tokenizer: Tokenizer | None, samples: tuple[int, int | None, int]
) -> DatasetSplits:
    """Datasets of so many samples for training, validation and test, from files or made up.

    Args:
        config: the resolved settings.
        tokenizer: what the data was made with, if there is one.
        samples: as ``samples_asked_for`` gives them.

    Raises:
        ValueError: if the files or the flags can't give the samples, naming flag, split and numbers.
    """
    return build_datasets(
        config.data,
        seq_length=config.model.seq_length,
        seed=config.training.seed,
        sizes=samples,
        eod=tokenizer.eod if tokenizer is not None and tokenizer.has_eod else None,
        vocab_size=config.model.true_vocab_size,
        validation_sets=config.evaluation.multiple_validation_sets,
        fim=_rearrangement(config, tokenizer),
    )


def _rearrangement(config: RunConfig, tokenizer: Tokenizer | None) -> tuple[FimConfig, TextTokenizer] | None:
    if not config.fim.fim_data:
        return None
    if tokenizer is None:
        raise ValueError(
            "--fim-data turns samples back into text: give the tokenizer that the data was made with, "
            "--tokenizer-type and its files"
        )
    return config.fim, tokenizer
