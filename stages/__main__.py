"""``python -m stages SPEC.json``: run one stage as its own process."""

import os
import sys

from stages.running import warm
from stages.running.process import main

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        print(
            "usage: python -m stages SPEC.json\n\nSPEC.json: {stage, config, seed, inputs: {name: path}, workdir};"
            " events are JSON lines on stdout.",
            file=sys.stderr,
        )
        sys.exit(0 if "-h" in sys.argv or "--help" in sys.argv else 2)
    code = main(sys.argv[1])
    # all is written: threads of the process group that still run must not abort the interpreter's end, which would be
    # this rank's
    if "RANK" in os.environ:
        sys.stderr.flush()
        os._exit(code)
    warm.leave(code)
