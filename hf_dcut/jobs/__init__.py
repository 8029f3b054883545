"""`hf-dcut run`: long jobs over files of prompts, which go on where they were when they are killed.

options.py   what a line may ask for
source.py    the lines of the input: those to answer, and those rejected
plan.py      what a job is to do
models.py    which models these are, to the byte, and how they are read
worker.py    line -> request, requests -> results
journal.py   a file that only grows by whole lines
output.py    results: whose they are, which lines are done, the parts of several processes
runner.py    one job, from its input to the last result
command.py   its command line and exit codes
"""
