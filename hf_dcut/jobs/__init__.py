"""`hf-dcut run`: long jobs over files of prompts, which go on where they were when they are killed.

source.py    the lines of the input: those to answer, and those rejected
models.py    target, tokenizer and drafter -> Worker: line -> request, requests -> results
journal.py   a file that only grows by whole lines
output.py    results and what belongs to them: whose they are, which lines are done, parts of several processes
runner.py    one job, from the input to the last result
command.py   its command line and exit codes
"""
