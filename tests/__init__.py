"""Tests. Flat, one file a concern; `conftest.py` starts the servers."""
