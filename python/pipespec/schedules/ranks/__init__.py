"""Schedule ``ranks``: each stage of a chain is a rank of ``torch.distributed``, on any machine."""
