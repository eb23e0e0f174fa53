"""Long convolution by FFT."""
