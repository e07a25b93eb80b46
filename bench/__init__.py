"""Measurements. Each prints a table and is run as `python -m bench.NAME`; no test asserts a duration."""
