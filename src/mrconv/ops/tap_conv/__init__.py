"""Convolution with a few taps at arbitrary lags."""
