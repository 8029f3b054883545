"""Measuring: methods compared side by side on real prompts, reports of that, and the check of a GPU.

command.py                          the arguments of `hf-dcut bench`
plan.py runner.py rounds.py         what is measured, in which order
methods.py peers.py policies.py     what is compared: ours, Transformers' own, other ways to cut
prompts.py drafter.py machine.py    on what
lossless.py                         whether the answers are the same
journal.py cell.py                  the run's file, and what it says of a cell
table.py report.py figures.py claims.py analysis.py     how it is shown
trace.py simulator.py surface.py forecast.py               recorded drafts on other machines
gpu_check.py kernel_check.py gpu/    `hf-dcut gpu-check`
"""
