"""Heavy scorers as worker processes: the protocol, both of its ends, and the adapters that call the real packages.

WHY processes: the packages exclude each other and the core (`transformers==4.45.2` against 5, `numpy<2` against 2; spec
scorers, section 5), so each has an environment of its own. What crosses the border is files of plain arrays and lines
of JSON: no pickle, no zarr, no torch tensor, so both sides may run other versions of everything.

    protocol.py   what is written and read; both sides import it; numpy only
    client.py     the stage's end: starts a worker, survives its death, halves batches
    serve.py      the worker's end: a loop over requests; main.py starts it
    adapters/     one file a package, imported by the worker alone

Everything but client.py is imported inside a foreign environment: no pydantic, no zarr, and no torch at a module's top.
"""
