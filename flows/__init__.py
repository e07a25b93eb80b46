"""The flows. Importing this package points Prefect, Hugging Face and temporary files below the storage root, unless
they have been set: it has to happen before Prefect is imported."""

from config.settings import apply_environment

apply_environment()
