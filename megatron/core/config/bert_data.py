"""How text becomes BERT samples."""

from dataclasses import dataclass

from megatron.core.config.field import flag


@dataclass(frozen=True)
class BertDataConfig:
    """Sentence pairs and masked words."""

    mask_prob: float = 0.15
    """Share of tokens that a BERT model has to predict."""
    short_seq_prob: float = 0.1
    """Share of BERT samples that aim at a random length below --seq-length."""
    bert_binary_head: bool = flag(True, off="--bert-no-binary-head")
    """Train on runs of sentences, without telling whether two segments are in order; documents of one
    sentence are of use then."""

    def __post_init__(self) -> None:
        if not 0 < self.mask_prob < 1:
            raise ValueError(f"--mask-prob {self.mask_prob}: must lie between 0 and 1")
        if not 0 <= self.short_seq_prob <= 1:
            raise ValueError(f"--short-seq-prob {self.short_seq_prob}: must be 0 to 1")
