"""Starts a worker inside a scorer's environment, where wcpipe is not installed: `python -u main.py`.

Only this repository's package `pipeline` is made importable, by its path. Putting its parent folder on sys.path would
show the worker the core's site-packages too, whose versions are the very reason for a process of its own; and the
folder of this script, which Python puts there, would let `adapters/hpsv3.py` stand in the way of the package hpsv3.
"""

import importlib.util
import sys
from pathlib import Path


def bootstrap() -> None:
    """Make `import pipeline...` work from this file's own tree and from nowhere else."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    package = here.parents[1]
    spec = importlib.util.spec_from_file_location(
        "pipeline", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pipeline"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    bootstrap()
    from pipeline.scorers.worker.serve import main

    sys.exit(main())
