"""The parts of `hf-dcut gpu-check`, and what they run on.

shapes.py chain.py rig.py           the models, their oracle, the sizes, what the parts share
ceilings.py                         what the device can do at most, and the least a step can take
clock.py supervisor.py              time for each part, and a process that may die
kernels.py exact.py costs.py selection.py graphs.py speed.py     the parts
report.py                           the page
"""
