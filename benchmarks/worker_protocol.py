"""What the worker protocol costs beside calling a scorer in-process: processor time of both sides, for 100 candidates.

    python benchmarks/worker_protocol.py --frames 17 --height 40 --width 64
    python benchmarks/worker_protocol.py --frames 17 --height 480 --width 832

The scorer computes nothing, so all that is measured is the cost of the protocol: files written and read, lines, arrays.
Processor time and not the clock, so that other work on the machine does not count. A real scorer's own time is then
compared with it: the share is `protocol / (scorer's seconds a candidate)`.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from pipeline.scorers.worker.client import Limits, Worker
from pipeline.scorers.worker.protocol import Item

ADAPTER = """
import numpy as np
class Nothing:
    version, weights = "nothing", "none"
    def measure(self, items):
        for item in items:
            yield {"score": np.zeros(len(item.video_FHW3))}
def load(settings, device):
    return Nothing()
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("frames", 17), ("height", 40), ("width", 64), ("candidates", 100), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    shape = (options.frames, options.height, options.width, 3)
    video = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        adapter = Path(folder) / "nothing.py"
        adapter.write_text(ADAPTER)
        limits = Limits(batch=options.batch)
        with Worker("nothing", Path(sys.executable), {}, scorer=str(adapter), limits=limits) as worker:
            worker.start()
            clock, stage = time.perf_counter(), time.process_time()
            for start in range(
                0, options.candidates, options.batch
            ):  # a group at a time, as the score stage does
                worker.measure([Item(video)] * min(options.batch, options.candidates - start))
            spent = {"stage": time.process_time() - stage, "worker": worker.seconds["all_cpu"]}
            clock = time.perf_counter() - clock
    per_candidate = sum(spent.values()) / options.candidates
    found = {
        **vars(options),
        **{f"{name}_seconds": round(value, 3) for name, value in spent.items()},
        "wall_seconds": round(clock, 2),
        "milliseconds_a_candidate": round(1000 * per_candidate, 2),
        "scorer_seconds_at_which_it_is_5_percent": round(per_candidate / 0.05, 3),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
