"""The work itself, one step a module. Nothing here knows Prefect; whatever imports torch, transformers, datasets, trl
or an MLflow flavor runs in a child process (`launcher`), as `python -m finetuning.STEP job.json`."""
