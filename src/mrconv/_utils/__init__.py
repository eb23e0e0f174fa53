"""Small helpers shared by the whole package: argument checks, registries, the model card and the code revision."""
