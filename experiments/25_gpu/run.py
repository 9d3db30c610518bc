"""autospec on a GPU: is it exact there, how fast, and how well are its costs foretold? One command.

    python experiments/25_gpu/run.py --out DIR                                  # CUDA if there is any; eight minutes
    python experiments/25_gpu/run.py --out DIR --device cpu --shapes tiny --quick     # a smoke test, anywhere

Runs from a bare checkout with PyTorch, transformers, NumPy, SciPy and scikit-learn: no weights, no hub, no database.
The most important comes first; what there was no time for is said. After every phase all that is known is written to
DIR/results.json, and a short table is printed last. Exits 1 where a check failed, 2 where it cannot begin.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from budget import Clock, OutOfTime
from phases import Run, everything
from playing import BACKENDS
from report import report
from shapes import SHAPES

FOLDER = Path(__file__).resolve().parent


def main() -> int:
    options = parse_options()
    run = Run(options, Clock(options.minutes))
    with tempfile.TemporaryDirectory() as costs:
        os.environ["AUTOSPEC_COSTS"] = costs  # measured now, not in an earlier run
        try:
            run.clock.ring()
            everything(run)
            run.clock.silence()
        except OutOfTime:
            run.leave_out(run.current, f"the {options.minutes:g} minutes were over in the middle of it")
        run.write()
    report(run.results)
    return 0 if run.is_fine else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for results.json")
    parser.add_argument("--device", choices=["cuda", "cpu"], default=None, help="cuda where there is a GPU, else cpu")
    parser.add_argument(
        "--shapes",
        default=None,
        help=f"targets in this order, of {', '.join(SHAPES)}; 7b,1b,13b on CUDA and tiny on the CPU if left out",
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="time for everything, enforced")
    parser.add_argument(
        "--backends",
        default=None,
        help=f"of {', '.join(BACKENDS)}; eager,compile on CUDA and eager on the CPU if left out",
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test: two rounds, few answers")
    options = parser.parse_args()
    has_cuda, why_not = (False, "") if options.device == "cpu" else cuda()
    if options.device == "cuda" and not has_cuda:
        parser.exit(2, f"{parser.prog}: --device cuda: {why_not}; say --device cpu\n")
    options.device = options.device or ("cuda" if has_cuda else "cpu")
    usual = "tiny" if options.device == "cpu" else ",".join(name for name in SHAPES if name != "tiny")
    options.shapes = (options.shapes or usual).split(",")
    options.backends = (options.backends or ("eager" if options.device == "cpu" else "eager,compile")).split(",")
    for option, given, known in (("shapes", options.shapes, SHAPES), ("backends", options.backends, BACKENDS)):
        if unknown := [name for name in given if name not in known]:
            parser.exit(2, f"{parser.prog}: --{option} {unknown[0]!r}: known are {', '.join(known)}\n")
    if not 0.1 <= options.minutes <= 600:
        parser.exit(2, f"{parser.prog}: --minutes {options.minutes:g}: from 0.1 to 600 are possible\n")
    return options


def cuda() -> tuple[bool, str]:
    """Is there a GPU that works? Else why not, in a line."""
    import torch

    try:
        torch.ones(1, device="cuda").add_(1).item()
    except (RuntimeError, AssertionError) as error:  # AssertionError: PyTorch was built without CUDA
        return False, f"PyTorch {torch.__version__} cannot use a GPU here ({str(error).splitlines()[0]})"
    return True, ""


if __name__ == "__main__":
    sys.exit(main())
