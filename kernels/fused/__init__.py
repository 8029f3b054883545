"""Triton twins of the references. Importing this package alone does not need Triton; its modules do."""
