"""Corpora before they are tokenized: cleaned, without near-duplicates, without the texts of test sets."""
