"""The training form: normalised branches computed as one convolution."""
