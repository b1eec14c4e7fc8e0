"""Fill in the middle: how much of the text is rearranged, and the tokens that say so."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FimConfig:
    """Fill-in-the-middle (Bavarian et al. 2022, https://arxiv.org/abs/2207.14255)."""

    fim_data: bool = False
    """Rearrange documents for fill-in-the-middle: prefix, suffix, middle."""
    fim_rate: float = 0.5
    """Share of the documents (or with --fim-split-sample, of the groups of fragments) that are rearranged."""
    fim_spm_rate: float = 0.5
    """Share of these that give the suffix before the prefix."""
    fim_split_sample: str | None = None
    """Token at which a document is split into fragments, each rearranged by itself; say, between files."""
    fim_fragment_rate: float | None = None
    """Share of the fragments that are rearranged, in a document that was chosen by --fim-rate."""
    fim_no_prefix: str | None = None
    """Leave text alone that starts with this."""
    fim_prefix_token: str = "<fim_prefix>"
    """Token before the prefix."""
    fim_middle_token: str = "<fim_middle>"
    """Token before the middle."""
    fim_suffix_token: str = "<fim_suffix>"
    """Token before the suffix."""
    fim_pad_token: str = "<fim_pad>"
    """Token that fills a sample which has become shorter; no loss is counted there."""
    fim_eod_token: str | None = None
    """Token between documents; default the tokenizer's end-of-document."""

    def __post_init__(self) -> None:
        for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be a share, from 0 to 1")
        if self.fim_split_sample is not None and self.fim_fragment_rate is None:
            raise ValueError(
                f"--fim-split-sample {self.fim_split_sample}: needs --fim-fragment-rate, the share of the "
                "fragments that are rearranged"
            )
        if self.fim_fragment_rate is not None and self.fim_split_sample is None:
            raise ValueError(
                f"--fim-fragment-rate {self.fim_fragment_rate}: needs --fim-split-sample, the token at which "
                "a document is split into fragments"
            )
