"""Optional accelerators, one adapter file each. None is required; plain PyTorch says what each computes."""
