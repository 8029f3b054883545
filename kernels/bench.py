"""Times every kernel against its reference, torch.compile of that, and the library, and prints one JSON line.

python kernels/bench.py                # on a CUDA device
TRITON_INTERPRET=1 python kernels/bench.py --tiny    # small shapes on any device: only that it runs
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from hf_dcut.bench.kernel_check import check_kernels, taken_paths, time_kernels
from hf_dcut.bench.machine import machine


def main() -> int:
    """Prints the machine, the paths it takes, and the seconds; 1 where a kernel and its reference disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes, on any device")
    parser.add_argument("--repeats", type=int, default=100, metavar="N", help="timed calls of each (default: 100)")
    given = parser.parse_args()
    if not given.tiny and not torch.cuda.is_available():
        parser.error("timing kernels needs a CUDA device; --tiny tries the program in small shapes")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # No time without agreement.
    checks = check_kernels(device, given.tiny)
    faults = [check for check in checks if not check["passed"]]
    times = [] if faults else time_kernels(device, given.tiny, given.repeats)
    found = {"machine": machine(), "tiny": given.tiny, "paths": taken_paths(device)}
    print(json.dumps({**found, "checked": len(checks), "faults": faults, "times": times}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
