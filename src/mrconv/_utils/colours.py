"""Colours of all figures."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#555555", "#cc79a7", "#e69f00")
"""Okabe and Ito's palette, which remains distinguishable with colour-vision deficiencies."""
