"""What Prefect runs, one step a module: names, caching, progress and artifacts for the UI around one call into
`finetuning`. Tasks hand over paths and fingerprints, never models or datasets."""
