"""Measuring: methods compared side by side on real prompts, and the check of a GPU."""
