"""Custom data: arrays, tables, texts, recordings and images from local files."""
