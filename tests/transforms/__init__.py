"""One table of torch functions (`cases.py`), one file for each transformation or composition of them."""
